#!/bin/sh
# Trains the whole demo family again on one GPU and puts it under src/tokenmill/demo. About 20 minutes on an H200.
#   sh train/demo/rebuild.sh [CORPUS_DIR]      without a folder only the generated and authored text is used
# STAGES picks parts (default: "main companions vision report install"), OUT is the folder of the results.
set -e
cd "$(dirname "$0")"
export PYTHONUNBUFFERED=1
CORPUS=${1:-}
OUT=${OUT:-../../out/demo}
STAGES=${STAGES:-main companions vision report install}
PY=${PYTHON:-python3}
mkdir -p "$OUT"
corpus() { [ -z "$CORPUS" ] || printf '%s\n%s' --corpus "$CORPUS"; }
IFS='
'
case $STAGES in *main*)
    $PY train.py --out "$OUT/main" --seconds "${MAIN_SECONDS:-300}" --seed 2 $(corpus)
    rm -f "$OUT/main-60.safetensors"
    $PY evaluate.py "$OUT/main" --report "$OUT/report.json" $(corpus)
esac
case $STAGES in *companions*)
    T=${COMPANION_SECONDS:-150}
    $PY distill.py draft --main "$OUT/main" --out "$OUT/draft" --seconds "$T" --workers 3 $(corpus) &
    A=$!
    $PY distill.py moe --main "$OUT/main" --out "$OUT/moe" --seconds "$T" $(corpus) &
    B=$!
    (
        $PY medusa.py --main "$OUT/main" --out "$OUT/medusa" --seconds $((T / 2)) $(corpus)
        $PY lora.py pirate --main "$OUT/main" --out "$OUT/lora-pirate" --seconds $((T / 4))
        $PY lora.py sql --main "$OUT/main" --out "$OUT/lora-sql" --seconds $((T / 5))
    ) &
    C=$!
    wait $A
    wait $B
    wait $C
esac
case $STAGES in *vision*)
    $PY distill.py text --main "$OUT/main" --out "$OUT/text" --seconds "${TEXT_SECONDS:-28}" --workers 12 $(corpus)
    $PY vision.py --text "$OUT/text" --tokenizer "$OUT/main" --out "$OUT/vlm" --seconds "${VISION_SECONDS:-90}" $(corpus)
esac
case $STAGES in *report*)
    $PY companions_eval.py "$OUT" --report "$OUT/companions.json"
esac
case $STAGES in *install*)
    for part in main draft moe medusa lora-pirate lora-sql vlm; do
        mkdir -p "../../src/tokenmill/demo/$part"
        for file in "$OUT/$part"/*; do
            case $file in */training.json | */report.json) ;; *) cp "$file" "../../src/tokenmill/demo/$part/" ;; esac
        done
    done
esac
