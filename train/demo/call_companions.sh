#!/bin/sh
# All companions in one call, side by side on one GPU, from a trained main model in $MAIN; then their evaluation.
cd "$(dirname "$0")"
export PYTHONUNBUFFERED=1
CORPUS=${CORPUS:-../../corpus}
MAIN=${MAIN:-../../src/tokenmill/demo/main}
WORK=${WORK:-/tmp/companions}
T=${T:-150}
mkdir -p "$WORK"
cp -r "$MAIN" "$WORK/main"
python3 distill.py draft --main "$MAIN" --out "$WORK/draft" --seconds "$T" --corpus "$CORPUS" --workers 3 >"$OUT/draft.log" 2>&1 &
A=$!
python3 distill.py moe --main "$MAIN" --out "$WORK/moe" --seconds "$T" --corpus "$CORPUS" --workers 4 >"$OUT/moe.log" 2>&1 &
B=$!
(python3 distill.py text --main "$MAIN" --out "$WORK/text" --seconds $((T / 3)) --corpus "$CORPUS" --workers 3
 python3 vision.py --text "$WORK/text" --tokenizer "$MAIN" --out "$WORK/vlm" --seconds $((T * 4 / 5)) --corpus "$CORPUS") >"$OUT/vision.log" 2>&1 &
C=$!
(python3 medusa.py --main "$MAIN" --out "$WORK/medusa" --seconds $((T / 2)) --corpus "$CORPUS"
 python3 lora.py pirate --main "$MAIN" --out "$WORK/lora-pirate" --seconds $((T / 4))
 python3 lora.py sql --main "$MAIN" --out "$WORK/lora-sql" --seconds $((T / 5))) >"$OUT/small.log" 2>&1 &
D=$!
wait $A $B $C $D
tail -n 2 "$OUT"/*.log
(cd "$WORK" && tar cf "$OUT/companions.tar" draft moe vlm medusa lora-pirate lora-sql)
ls -l "$OUT"
python3 companions_eval.py "$WORK" --report "$OUT/companions.json" --count "${COUNT:-200}" 2>&1 | grep -v Loading
