#!/bin/sh
# The main model in one call: train, evaluate, golden prompts. TRAIN and EVAL are seconds.
cd "$(dirname "$0")"
export PYTHONUNBUFFERED=1
CORPUS=${CORPUS:-../../corpus}
SEED=${SEED:-1}
python3 train.py --out "$OUT/main" --seconds "${TRAIN:-370}" --corpus "$CORPUS" --seed "$SEED"
rm -f "$OUT"/main-60.safetensors
python3 evaluate.py "$OUT/main" --corpus "$CORPUS" --count "${COUNT:-500}" --needles 100 --seconds "${EVAL:-85}" --report "$OUT/report.json"
