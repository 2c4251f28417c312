"""Flags of `vllm bench`. Owns: what each becomes under `tokenmill bench`, whose verbs have names of their own.

They come before the flags of engines, because some names mean another thing there. Must not know: verbs.
"""

from __future__ import annotations

from collections.abc import Mapping

from tokenmill.cli.foreign_kinds import Foreign, ignored, refused, same

_LINES = "--workload FILE reads requests, one per line; without it they are made up (random)"

BENCH: Mapping[str, Foreign] = {
    **same("--repeat", "--num-iters"),
    **same("--warmup", "--num-warmups"),
    **same("--input-len", "--random-input-len --sonnet-input-len --prompt-len"),
    **same(
        "--output-len",
        "--random-output-len --sonnet-output-len --sharegpt-output-len --custom-output-len --hf-output-len "
        "--prefix-repetition-output-len",
    ),
    **same("--prefix-len", "--random-prefix-len --sonnet-prefix-len --prefix-repetition-prefix-len"),
    **same("--num-prefixes", "--prefix-repetition-num-prefixes"),
    **same("--json", "--output-json --result-filename"),
    **same("--users", "--concurrency"),
    **same("--model", "--served-model-name"),
    "--backend": Foreign(
        why="servers are asked over OpenAI's API: at /v1/completions, with --chat at /v1/chat/completions",
        values={"vllm": "", "openai": "", "openai-chat": "--chat"},
    ),
    "--endpoint": Foreign(
        why="--chat chooses /v1/chat/completions; others are not measured",
        values={"/v1/completions": "", "/v1/chat/completions": "--chat"},
    ),
    **refused(_LINES, "--dataset-name", "random"),
    **refused(_LINES, "--dataset --dataset-path --hf-split --hf-subset --hf-name"),
    **refused("a range is a form of --input-len and --output-len: 64:192", "--random-range-ratio", "0", "0.0"),
    **refused("the server is named whole: `bench serve http://HOST:PORT`", "--host --port"),
    **refused("each request has one greedy answer", "--n --best-of", "1"),
    **refused("each request has one greedy answer", "--use-beam-search", takes=0),
    **refused("--json FILE writes the results", "--save-result --save-detailed --append-result", takes=0),
    **refused("--json FILE writes the results", "--result-dir --metadata --label"),
    **refused("`bench serve` measures a server, the other verbs an engine in this process", "--async-engine", takes=0),
    **refused("`LLM.start_profile()` and `stop_profile()` write a trace", "--profile", takes=0),
    **refused("--enable-lora --lora-modules NAME=FOLDER loads an adapter", "--lora-path"),
    **refused("requests have the fields that are measured, and no others", "--extra-body --header --logprobs"),
    **refused("--sweep raises the rate", "--ramp-up-strategy --ramp-up-start-rps --ramp-up-end-rps"),
    **ignored("a run before the first one warms up", "--num-iters-warmup --ready-check-timeout-sec"),
    **ignored("all metrics are reported", "--percentile-metrics"),
    **ignored("a line shows progress on terminals", "--disable-tqdm", takes=0),
}  # fmt: skip
"""vLLM's flag -> what to do with it; what both programs call by one name is no entry."""
