#!/bin/sh
# The vision model alone, from a trained main model in $MAIN.
cd "$(dirname "$0")"
export PYTHONUNBUFFERED=1
CORPUS=${CORPUS:-../../corpus}
MAIN=${MAIN:-../../src/tokenmill/demo/main}
WORK=${WORK:-/tmp/vision}
python3 distill.py text --main "$MAIN" --out "$WORK/text" --seconds "${TEXT:-40}" --corpus "$CORPUS" --workers 12
python3 vision.py --text "$WORK/text" --tokenizer "$MAIN" --out "$OUT/vlm" --seconds "${T:-120}" --corpus "$CORPUS"
