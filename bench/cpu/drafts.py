"""What drafts are worth on a CPU: tokens per second of one stream, plain and with each drafter. JSON on stdout; wants a
quiet machine.

python bench/cpu/drafts.py [demo] [text] [fails] [text-1b] [fails-1b] [geometry]     (default: all; about six minutes on
two cores)

    demo      the demo with its own draft model and Medusa heads, on prompts of its skills
    text      n-grams and suffixes on real text of this repository: files that are written again with a name changed,
              and JSON that is written again with a field changed
    fails     the same drafters on text of which nothing comes again
    text-1b, fails-1b     the same with a 1B geometry in int4
    geometry  a 1B geometry with a draft model of 100M, both in int4; each guess survives with probability 0.7

What the model says is made certain for `text` and `fails`: what it has chosen is overwritten with the wanted token,
before drafts are verified. Drafts, verification and control work as ever. For `geometry` a hash that drafter and
control do not know decides whether a guess is what the model will say. All engines answer each prompt in turn; a prompt
counts with the medians of its turns. `over_plain` compares seconds, `cpu_over_plain` the processor time of the process.
The control is on, and the first turns, in which it learns, do not count (two; one for large models).
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
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import torch  # noqa: E402
from geometry import GEOMETRY  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from tokenmill import LLM, SamplingParams  # noqa: E402

ROOT = pathlib.Path(__file__).parents[2]
LEARNS, TURNS = 2, 3
DEMO = ROOT / "src/tokenmill/demo"
SURVIVES = 0.7
SMALL = {"hidden_size": 640, "intermediate_size": 1728, "num_hidden_layers": 4, "num_attention_heads": 10,
         "num_key_value_heads": 2}  # fmt: skip
LARGE = {"load_format": "dummy", "max_num_seqs": 4, "quantization": "int4"}
TASKS = (
    "Tell me a story about a miller and a fox.",
    'Extract name and city as JSON: "Anna lives in Bremen and works as a teacher."',
    "What is 348 + 277?",
    "What is the capital of France, and on which continent is it?",
)


Run = tuple[float, float, int, int]
"""Seconds, seconds of the processor, tokens, steps."""


def one_run(llm: LLM, prompt: Any, params: SamplingParams) -> Run:
    """Answer one prompt."""
    counters = llm.engine.scheduler.counters
    tokens, steps = counters.output_tokens, counters.steps
    begin, busy = time.perf_counter(), time.process_time()
    llm.generate([prompt], params, use_tqdm=False)
    spent = time.perf_counter() - begin, time.process_time() - busy
    return *spent, counters.output_tokens - tokens, counters.steps - steps


def compare(
    engines: dict[str, LLM], prompts: list[Any], params: list[SamplingParams], begin: Any = None, learns: int = LEARNS
) -> dict[str, Any]:
    """All engines by turns -> tokens per second and per step, and each one's speed over the first one's. begin: called
    with each engine and the number of the prompt that it is given next. learns: turns that do not count."""
    found: dict[str, list[list[Run]]] = {name: [[] for _ in prompts] for name in engines}
    for turn in range(learns + TURNS):
        for n, prompt in enumerate(prompts):
            for name, llm in engines.items():
                if begin is not None:
                    begin(llm, n)
                run = one_run(llm, prompt, params[n])
                if turn >= learns:
                    found[name][n].append(run)
    sums = {
        name: [sum(statistics.median(run[i] for run in runs) for runs in each) for i in range(4)]
        for name, each in found.items()
    }
    plain = sums[next(iter(engines))]
    return {
        name: {
            "tok_s": round(tokens / seconds, 1),
            "over_plain": round(tokens / seconds / (plain[2] / plain[0]), 3),
            "cpu_over_plain": round(tokens / busy / (plain[2] / plain[1]), 3),
            "tokens_per_step": round(tokens / steps, 2),
        }
        for name, (seconds, busy, tokens, steps) in sums.items()
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
            "greedy": compare(engines, prompts, [greedy] * len(prompts)),
            "temperature 0.8": compare(engines, prompts, [sampled] * len(prompts)),
        }
    finally:
        for llm in engines.values():
            llm.close()


class Dictated:
    """Overwrites what an engine's only row has chosen."""

    def __init__(self, llm: LLM) -> None:
        self.text = torch.zeros(0, dtype=torch.int64)
        """The token at each position, those of the prompt included."""
        runner = llm.engine.executor.runner
        take, choose = runner._take, runner._choose

        def take_wanted(running: Any, best: tuple[torch.Tensor, ...]) -> None:
            self._write(running, None, best[:2])
            take(running, best)

        def choose_wanted(running: Any, logits: torch.Tensor, at: torch.Tensor | None, late: Any) -> Any:
            sampled, marked = choose(running, logits, at, late)
            self._write(running, at, (sampled.ids, marked))
            return sampled, marked

        runner._take, runner._choose = take_wanted, choose_wanted

    def _write(self, running: Any, at: torch.Tensor | None, chosen: tuple[torch.Tensor, ...]) -> None:
        places = running.batch.ctx.positions if at is None else running.batch.ctx.positions[at]
        wanted = self.text[places[: chosen[0].shape[0]] + 1]
        for ids in chosen:
            ids.copy_(wanted)


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


def bench_dictated(pairs: list[tuple[str, str]], large: bool = False) -> dict[str, Any]:
    """n-grams and suffixes where the model says just this. large: a 1B geometry in int4, and less text."""
    configs = {
        "plain": None,
        "ngram": {"method": "ngram", "num_speculative_tokens": 8},
        "suffix": {"method": "suffix", "num_speculative_tokens": 8, "suffix_decoding_max_cached_requests": 0},
    }
    with tempfile.TemporaryDirectory() as folder:
        model, options = "demo", {"max_model_len": 4096}
        if large:
            model, options = write_config(folder, "target", {}), {"max_model_len": 1024, **LARGE}
        engines = {name: LLM(model, speculative_config=config, **options) for name, config in configs.items()}
        try:
            tokenizer = Tokenizer.from_file(str(DEMO / "main/tokenizer.json"))
            given = [tokenizer.encode(f"Write this again:\n{one}\n").ids for one, _ in pairs]
            wanted = [tokenizer.encode(other).ids[:500] for _, other in pairs]
            if large:
                given, wanted = [one[:300] for one in given[:2]], [other[:96] for other in wanted[:2]]
            dictating = {id(llm): Dictated(llm) for llm in engines.values()}

            def begin(llm: LLM, n: int) -> None:
                dictating[id(llm)].text = torch.tensor(given[n] + wanted[n] + [0] * 32)

            params = [
                SamplingParams(temperature=0.0, max_tokens=len(w), ignore_eos=True, detokenize=False) for w in wanted
            ]
            prompts = [{"prompt_token_ids": ids} for ids in given]
            return compare(engines, prompts, params, begin, 1 if large else LEARNS)
        finally:
            for llm in engines.values():
                llm.close()


def failing() -> list[tuple[str, str]]:
    """Words in an order that never comes again, of a few, so that short matches abound."""
    dice = random.Random(0)
    words = re.findall(r"\w+", "the miller of a town in his mill and with one more bag for her")
    return [(" ".join(dice.choices(words, k=200)), " ".join(dice.choices(words, k=500))) for _ in range(3)]


def write_config(folder: str, name: str, changes: dict[str, int]) -> str:
    """The folder of a 1B geometry, or of what `changes` makes of it."""
    root = pathlib.Path(folder) / name
    root.mkdir()
    (root / "config.json").write_text(json.dumps({**GEOMETRY, **changes}))
    return str(root)


def bench_geometry() -> dict[str, Any]:
    """Random weights: the drafter's own tokens are replaced by what the plain model said, where a hash says so."""
    with tempfile.TemporaryDirectory() as folder:
        target, draft = write_config(folder, "target", {}), write_config(folder, "draft", SMALL)
        options = {"max_model_len": 1024, **LARGE}
        config = {"model": draft, "num_speculative_tokens": 4, "quantization": "int4"}
        engines = {
            "plain": LLM(target, **options),
            "draft model": LLM(target, **options, speculative_config=config),
        }
        prompts: list[Any] = [{"prompt_token_ids": [1000 + 7 * n % 900 + 31 * i for i in range(16)]} for n in range(2)]
        params = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True, detokenize=False)
        try:
            texts = [
                [*p["prompt_token_ids"], *o.outputs[0].token_ids]
                for p, o in zip(prompts, engines["plain"].generate(prompts, params, use_tqdm=False), strict=True)
            ]
            tell(engines["draft model"], texts)
            return compare(engines, prompts, [params] * len(prompts), learns=1)
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
    "text-1b": lambda: bench_dictated(edits(), large=True),
    "fails-1b": lambda: bench_dictated(failing(), large=True),
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
