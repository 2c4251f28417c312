#!/bin/sh
# A short first call on a GPU: throughput, a small sweep of the learning rate, and a check of the evaluation.
set -e
cd "$(dirname "$0")"
export PYTHONUNBUFFERED=1
CORPUS=${CORPUS:-../../corpus}
python3 train.py --out "$OUT/probe" --seconds "${SECONDS_EACH:-45}" --corpus "$CORPUS" --muon "${MUON:-0.02}"
python3 evaluate.py "$OUT/probe" --corpus "$CORPUS" --count 60 --needles 10 --seconds 60
rm -f "$OUT"/probe/model.safetensors "$OUT"/probe/tokenizer* "$OUT"/*-60.safetensors
