#!/bin/sh
# Trains the whole demo family again on one GPU and puts it under src/tokenmill/demo.
# It takes about 15 minutes on an H200: main 8 (start 80 s, steps 340 s, evaluation beside the rest), all that follows 7 more.
#   sh train/demo/rebuild.sh [CORPUS_DIR]      without a folder only the generated and authored text is used
# STAGES picks parts (default: "main companions vision report install"), OUT is the folder of the results.
# START=FOLDER goes on from the weights of an earlier run (MAIN_SECONDS says for how long).
# SECOND_CARD=N: the vision model has GPU N to itself, so neither it nor the draft waits for the other.
# SMOKE=1 takes a few small steps of each part, for a check on a CPU (with STAGES without "install").
# Parts that follow the main model start at 60 % of its time: they compile meanwhile and wait for its last weights.
set -e
HERE=$PWD
cd "$(dirname "$0")"
export PYTHONUNBUFFERED=1
CORPUS=${1:-}
case $CORPUS in "" | /*) ;; *) CORPUS=$HERE/$CORPUS ;; esac
OUT=${OUT:-../../out/demo}
JOBS=
case ${START:=} in "" | /*) ;; *) START=$HERE/$START ;; esac
STAGES=${STAGES:-main companions vision report install}
PY=${PYTHON:-python3}
SMALL=${SMOKE:+--smoke}
SECOND_CARD=${SECOND_CARD:-}
mkdir -p "$OUT"
corpus() { [ -z "$CORPUS" ] || printf '%s\n%s' --corpus "$CORPUS"; }
has() { case $STAGES in *$1*) ;; *) return 1 ;; esac; }
until_file() { while [ ! -e "$1" ]; do kill -0 "$2" 2>/dev/null || [ -e "$1" ] || exit 1; sleep 1; done; }
IFS='
'
# A companion's mark is made however it ends: the vision model waits for all three and has the card to itself then.
rm -f "$OUT"/moe.done "$OUT"/heads.done "$OUT"/draft.done
until_done() { for part in moe heads draft; do while [ ! -e "$OUT/$part.done" ]; do sleep 1; done; done; }
MAIN=$$
if has main; then
    rm -rf "$OUT/main" "$OUT/main-60.safetensors"
    GO_ON=$([ -z "$START" ] || printf '%s\n%s\n%s\n%s' --start "$START" --peak 0.6)
    $PY train.py --out "$OUT/main" --seconds "${MAIN_SECONDS:-340}" --seed "${SEED:-2}" $GO_ON $SMALL $(corpus) &
    MAIN=$!
    [ -n "$SMALL" ] || until_file "$OUT/main-60.safetensors" $MAIN
    (
        until_file "$OUT/main/training.json" $MAIN
        $PY evaluate.py "$OUT/main" --report "$OUT/report.json" $SMALL $(corpus)
    ) &
    JOBS="$MAIN
$!"
fi
if has companions; then
    T=${COMPANION_SECONDS:-110}
    rm -f "$OUT/medusa/config.json" "$OUT/text/training.json"
    (
        trap 'touch "$OUT/moe.done"' EXIT
        $PY distill.py moe $SMALL --main "$OUT/main" --out "$OUT/moe" --seconds "$T" $(corpus)
        ! has report || $PY companions_eval.py "$OUT" --parts moe --report "$OUT/moe.json" $SMALL
    ) &
    JOBS="$JOBS
$!"
    (
        trap 'touch "$OUT/heads.done"' EXIT
        $PY medusa.py $SMALL --main "$OUT/main" --out "$OUT/medusa" --seconds $((T / 2)) $(corpus)
        $PY lora.py pirate $SMALL --main "$OUT/main" --out "$OUT/lora-pirate" --seconds $((T / 3))
        $PY lora.py sql $SMALL --main "$OUT/main" --out "$OUT/lora-sql" --seconds $((T / 4))
        ! has report || $PY companions_eval.py "$OUT" --parts lora --report "$OUT/lora.json" $SMALL
    ) &
    HEADS=$!
    JOBS="$JOBS
$HEADS"
    # With a vision model to make, the draft leaves the GPU to its text part first.
    AFTER=$(! has vision || [ -n "$SECOND_CARD" ] || printf '%s\n%s' --after "$OUT/text/training.json")
    (
        trap 'touch "$OUT/draft.done"' EXIT
        $PY distill.py draft $SMALL --main "$OUT/main" --out "$OUT/draft" --seconds $((T * 3 / 4)) --workers 3 \
            $AFTER $(corpus)
        until_file "$OUT/medusa/config.json" $HEADS
        ! has report || $PY companions_eval.py "$OUT" --parts speculation,draft_text --report "$OUT/draft.json" $SMALL
    ) &
    JOBS="$JOBS
$!"
fi
if has vision; then
    (
        [ -z "$SECOND_CARD" ] || export CUDA_VISIBLE_DEVICES=$SECOND_CARD
        $PY distill.py text $SMALL --main "$OUT/main" --out "$OUT/text" --seconds "${TEXT_SECONDS:-80}" --workers 8 \
            $(corpus)
        ! has companions || [ -n "$SECOND_CARD" ] || until_done
        $PY vision.py $SMALL --text "$OUT/text" --tokenizer "$OUT/main" --out "$OUT/vlm" \
            --seconds "${VISION_SECONDS:-170}" $(corpus)
        ! has report || $PY companions_eval.py "$OUT" --parts vision,vlm_text --report "$OUT/vision.json" $SMALL
    ) &
    JOBS="$JOBS
$!"
fi
# A part that fails must not cut off the others.
FAILED=
for job in $JOBS; do wait "$job" || FAILED=1; done
rm -f "$OUT/main-60.safetensors"
[ -z "$FAILED" ] || exit 1
if has install; then
    for part in main draft moe medusa lora-pirate lora-sql vlm; do
        mkdir -p "../../src/tokenmill/demo/$part"
        for file in "$OUT/$part"/*; do
            case $file in */training.json | */report.json) ;; *) cp "$file" "../../src/tokenmill/demo/$part/" ;; esac
        done
    done
fi
