"""What drafts are worth on a CPU: tokens per second of one stream, plain and with each drafter. JSON on stdout; wants a
quiet machine.

python bench/cpu/drafts.py [demo] [text] [fails] [geometry]     (default: all; about seven minutes on two cores)

    demo      the demo with its own draft model and Medusa heads, on prompts of its skills
    text      n-grams and suffixes on real text of this repository: files that are written again with a name changed,
              and JSON that is written again with a field changed
    fails     the same drafters on text of which nothing comes again
    geometry  a 1B geometry with a draft model of 100M, each of whose guesses survives with probability 0.7

What the model says is made certain for `text` and `fails`: a logit bias is not enough, so a logits processor of the
benchmark forces the wanted text, token by token; drafts, verification and control work as ever. Its own time is in both
figures. For `geometry` a hash that drafter and control do not know decides whether a guess is what the model will say.
Runs are told by turns (plain, drafts, plain, ...), and the medians are compared. The control is on.
"""

from __future__ import annotations

import json
import pathlib
import random
import re
import statistics
import sys
import tempfile
import time
from typing import Any

from tokenmill.core.config import calm_threads

calm_threads()

from tokenmill import LLM, SamplingParams  # noqa: E402

ROOT = pathlib.Path(__file__).parents[2]
RUNS = 3
DEMO = ROOT / "src/tokenmill/demo"
SURVIVES = 0.7
SMALL = {"hidden_size": 640, "intermediate_size": 1728, "num_hidden_layers": 4, "num_attention_heads": 10,
         "num_key_value_heads": 2}  # fmt: skip
TASKS = (
    "Tell me a story about a miller and a fox.",
    'Extract name and city as JSON: "Anna lives in Bremen and works as a teacher."',
    "What is 348 + 277?",
    "What is the capital of France, and on which continent is it?",
)


def one_run(llm: LLM, prompts: list[Any], params: Any) -> tuple[float, int, int]:
    """Each prompt alone: seconds, tokens, steps."""
    counters = llm.engine.scheduler.counters
    tokens, steps, begin = counters.output_tokens, counters.steps, time.perf_counter()
    for n, prompt in enumerate(prompts):
        llm.generate([prompt], params[n] if isinstance(params, list) else params, use_tqdm=False)
    return time.perf_counter() - begin, counters.output_tokens - tokens, counters.steps - steps


def compare(engines: dict[str, LLM], prompts: list[Any], make_params: Any) -> dict[str, Any]:
    """All engines by turns -> tokens per second and per step, and each one's speed over the first one's."""
    found: dict[str, list[tuple[float, int, int]]] = {name: [] for name in engines}
    for turn in range(RUNS + 1):
        for name, llm in engines.items():
            run = one_run(llm, prompts, make_params(llm))
            if turn:  # the first one compiles, and the control finds out what steps cost
                found[name].append(run)
    speeds = {name: statistics.median(tokens / seconds for seconds, tokens, _ in runs) for name, runs in found.items()}
    plain = speeds[next(iter(engines))]
    return {
        name: {
            "tok_s": round(speeds[name], 1),
            "over_plain": round(speeds[name] / plain, 3),
            "tokens_per_step": round(sum(r[1] for r in runs) / sum(r[2] for r in runs), 2),
        }
        for name, runs in found.items()
    }


def bench_demo() -> dict[str, Any]:
    """Its own drafters on its own skills, greedy and sampled."""
    configs = {
        "plain": None,
        "draft model": {"model": str(DEMO / "draft"), "num_speculative_tokens": 6},
        "medusa": {"method": "medusa", "model": str(DEMO / "medusa"), "num_speculative_tokens": 3},
        "lookahead": {"method": "lookahead"},
        "suffix": {"method": "suffix"},
    }
    engines = {name: LLM("demo", speculative_config=config, max_model_len=2048) for name, config in configs.items()}
    prompts = [f"<|im_start|>user\n{task}<|im_end|>\n<|im_start|>assistant\n" for task in TASKS]
    try:
        greedy = SamplingParams(temperature=0.0, max_tokens=160)
        sampled = SamplingParams(temperature=0.8, seed=1, max_tokens=160)
        return {
            "greedy": compare(engines, prompts, lambda llm: greedy),
            "temperature 0.8": compare(engines, prompts, lambda llm: sampled),
        }
    finally:
        for llm in engines.values():
            llm.close()


class Dictated:
    """A logits processor that has the model say a text."""

    def __init__(self, wanted: list[int]) -> None:
        self.wanted = wanted

    def __call__(self, said: list[int], logits: Any) -> Any:
        if len(said) < len(self.wanted):
            logits[self.wanted[len(said)]] = 1e4
        return logits


def edits() -> list[tuple[str, str]]:
    """(what is given, what is to be written) from files of this repository."""
    code = (ROOT / "src/tokenmill/speculate/suffix.py").read_text()[:3000]
    other = (ROOT / "src/tokenmill/kvcache/states.py").read_text()[:3000]
    data = json.dumps(json.loads((DEMO / "main/config.json").read_text()), indent=1)
    rows = json.dumps(
        [{"id": n, "name": f"file {n}", "size": n * 37 % 101, "kind": "text"} for n in range(30)], indent=1
    )
    listed = json.dumps(rows, indent=1)
    return [
        (code, code.replace("Generation", "Epoch").replace("answers", "replies")),
        (other, other.replace("slot", "place")),
        (data, data.replace("6144", "8192")),
        (listed, listed.replace('"kind": "text"', '"kind": "note"')),
    ]


def bench_dictated(pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """n-grams and suffixes where the model says just this."""
    configs = {
        "plain": None,
        "ngram": {"method": "ngram", "num_speculative_tokens": 8},
        "suffix": {"method": "suffix", "num_speculative_tokens": 8, "suffix_decoding_max_cached_requests": 0},
    }
    engines = {name: LLM("demo", speculative_config=config, max_model_len=4096) for name, config in configs.items()}
    tokenizer = engines["plain"].get_tokenizer()
    given = [f"Write this again:\n{one}\n" for one, _ in pairs]
    wanted = [tokenizer.encode(other)[:700] for _, other in pairs]
    try:
        return compare(
            engines,
            given,
            lambda llm: [
                SamplingParams(temperature=0.0, max_tokens=len(w), ignore_eos=True, logits_processors=[Dictated(w)])
                for w in wanted
            ],
        )
    finally:
        for llm in engines.values():
            llm.close()


def failing() -> list[tuple[str, str]]:
    """Words in an order that never comes again, of a few, so that short matches abound."""
    dice = random.Random(0)
    words = re.findall(r"\w+", "the miller of a town in his mill and with one more bag for her")
    return [(" ".join(dice.choices(words, k=200)), " ".join(dice.choices(words, k=500))) for _ in range(3)]


def bench_geometry() -> dict[str, Any]:
    """Random weights: the drafter's own tokens are replaced by what the plain model said, where a hash says so."""
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    from geometry import GEOMETRY

    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name, config in (("target", GEOMETRY), ("draft", {**GEOMETRY, **SMALL})):
            (root / name).mkdir()
            (root / name / "config.json").write_text(json.dumps(config))
        options = {"load_format": "dummy", "max_model_len": 1024, "max_num_seqs": 4, "quantization": "int8"}
        config = {"model": str(root / "draft"), "num_speculative_tokens": 4, "quantization": "int8"}
        engines = {
            "plain": LLM(str(root / "target"), **options),
            "draft model": LLM(str(root / "target"), **options, speculative_config=config),
        }
        prompts: list[Any] = [{"prompt_token_ids": [1000 + 7 * n % 900 + 31 * i for i in range(16)]} for n in range(2)]
        params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, detokenize=False)
        try:
            texts = [
                [*p["prompt_token_ids"], *o.outputs[0].token_ids]
                for p, o in zip(prompts, engines["plain"].generate(prompts, params, use_tqdm=False), strict=True)
            ]
            tell(engines["draft model"], texts)
            return compare(engines, prompts, lambda llm: params)
        finally:
            for llm in engines.values():
                llm.close()


def tell(llm: LLM, texts: list[list[int]]) -> None:
    """After each honest proposal its drafts become what will be said, or something else."""
    drafter = llm.engine.executor.runner.drafter
    honest = drafter.propose

    def propose(step: Any) -> None:
        honest(step)
        for row in step.row_list:
            known = int(step.rows.length[row])
            told = step.rows.tokens[row, :known].tolist()
            text = next((t for t in texts if t[: min(known, len(t))] == told[: len(t)]), [])
            for n in range(step.count):
                at = known + n
                right = at < len(text) and random.Random(at * 7919 + len(text)).random() < SURVIVES
                step.rows.tokens[row, at] = text[at] if right else 999

    drafter.propose = propose


WHAT = {
    "demo": bench_demo,
    "text": lambda: bench_dictated(edits()),
    "fails": lambda: bench_dictated(failing()),
    "geometry": bench_geometry,
}


def main(names: list[str]) -> None:
    """Print as it comes, so that nothing is lost."""
    for name in names or list(WHAT):
        begin = time.perf_counter()
        found = WHAT[name]()
        print(json.dumps({"what": name, "seconds": round(time.perf_counter() - begin, 1), **found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
