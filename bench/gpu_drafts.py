"""What drafts are worth on a GPU, for text that survives as often as it is told to.

python bench/gpu_drafts.py [--rows 1,8,256] [--p 0.7] [--most 4] [--cases draft,eagle3,...] [--layers N] [--json OUT]

Weights are invented, so nothing that a drafter guesses would ever be right. A stand-in therefore decides: in the place
where drafts are verified each draft is taken as right with probability p, by a hash of its row and position that
neither the drafter nor the control knows. All else is as in service: plans in flight, recorded steps, the control
switched on. Shown are tokens per second of the same requests with and without drafts, their ratio, and tokens per
step. (What the stand-in itself costs, one launch a step, counts against the drafts.)
"""

from __future__ import annotations

import argparse
import gc
import json
import pathlib
import tempfile
import time
import traceback
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from geometries import GEOMETRIES, few_layers
from tokenmill import LLM, SamplingParams

TARGET, DRAFT = GEOMETRIES["llama-3-8b"], GEOMETRIES["llama-3.2-1b"]
MEDUSA = {"num_heads": 4, "num_hidden_layers": 1, "original_lm_head": True, "medusa_fc_bias": True}
EAGLE3 = {**TARGET, "num_hidden_layers": 1, "draft_vocab_size": 32000}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "draft": (DRAFT, {}, {}),
    "draft-int4": (DRAFT, {"quantization": "int4"}, {}),
    "draft-fp8": (DRAFT, {}, {"quantization": "fp8"}),
    "draft-int4-fp8": (DRAFT, {"quantization": "int4"}, {"quantization": "fp8"}),
    "medusa": (MEDUSA, {"method": "medusa"}, {}),
    "eagle3": (EAGLE3, {"method": "eagle3"}, {}),
    "eagle3-fp8": (EAGLE3, {"method": "eagle3"}, {"quantization": "fp8"}),
}
"""The drafter's config, its method, and options of the engine (which the plain one has, too)."""


AHEAD = tl.constexpr(64)
"""No row has so many drafts."""


@triton.jit(do_not_specialize=["count", "bound", "vocabulary", "places"])
def _force_kernel(grant_ptr, length_ptr, token_ptr, marked_ptr, count, bound, vocabulary, places):
    """What the target says of one row's drafts: the draft where a hash of its row and place is small, else another."""
    grant = grant_ptr + tl.program_id(0)
    row, first = tl.load(grant).to(tl.int64), tl.load(grant + count)
    ahead = tl.arange(0, AHEAD)
    place = tl.load(length_ptr + row) + ahead.to(tl.int64)
    tried = ahead < tl.load(grant + 2 * count)
    draft = tl.load(token_ptr + row * places + tl.minimum(place, places - 1), mask=tried, other=0).to(tl.int64)
    mixed = (place * 1000003 + row + 12345) * -7046029254386353131
    mixed = (mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)) * -7046029254386353131
    said = tl.where(((mixed >> 40) & 0xFFFFFF) < bound, draft, (draft + 1) % vocabulary)
    tl.store(marked_ptr + first + ahead, said, mask=tried)


def force(llm: LLM, p: float) -> None:
    """Verification finds each draft right with probability p."""
    runner = llm.engine.executor.runner
    kernels, vocabulary = runner.kernels, runner.model.spec.vocab_size
    honest = kernels.accept_
    bound = int(p * (1 << 24))

    def accept_(
        grants: Tensor,
        most: int,
        parents: None,
        marked: Tensor,
        tokens: Tensor,
        length: Tensor,
        computed: Tensor,
    ) -> tuple[Tensor | None, Tensor]:
        sent = grants.contiguous()
        _force_kernel[(sent.shape[1],)](sent, length, tokens, marked, sent.shape[1], bound, vocabulary, tokens.shape[1])
        return honest(grants, most, parents, marked, tokens, length, computed)

    kernels.accept_ = accept_


def measure(llm: LLM, rows: int, count: int, prompt: int) -> dict[str, float]:
    """Tokens per second of `rows` requests at once, the best of three runs; the first one warms up."""
    prompts = [{"prompt_token_ids": [(7 * i + 31 * n) % 499 for n in range(prompt)]} for i in range(rows)]
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    counters, best, steps = llm.engine.scheduler.counters, 0.0, 1
    for _ in range(4):
        before, start = counters.steps, time.perf_counter()
        made = sum(len(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False))
        seconds = time.perf_counter() - start
        if made / seconds > best:
            best, steps = made / seconds, counters.steps - before
    return {"tokens_per_s": best, "tokens_per_step_and_row": count / steps}


def open_llm(folder: pathlib.Path, options: dict[str, Any], speculative: dict[str, Any] | None) -> LLM:
    """An engine with invented weights."""
    return LLM(
        model=str(folder), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=4096,
        max_num_seqs=256, gpu_memory_utilization=0.4, speculative_config=speculative, **options,
    )  # fmt: skip


def give_back() -> None:
    """The memory of an engine that nobody holds any longer."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def without_drafts(folder: pathlib.Path, more: dict[str, Any], options: argparse.Namespace) -> dict[int, float]:
    """Tokens per second of each number of rows."""
    with open_llm(folder, more, None) as llm:
        return {n: measure(llm, n, options.tokens, options.prompt)["tokens_per_s"] for n in options.rows}


def with_drafts(
    folder: pathlib.Path, more: dict[str, Any], asked: dict[str, Any], options: argparse.Namespace
) -> dict[int, dict[str, Any]]:
    """The same, and what the control has settled on."""
    found: dict[int, dict[str, Any]] = {}
    with open_llm(folder, more, asked) as llm:
        force(llm, options.p)
        for n in options.rows:
            made = measure(llm, n, options.tokens, options.prompt)
            crowd = llm.engine.scheduler.ahead.control.crowds.get(n.bit_length())
            found[n] = {
                "drafts": made["tokens_per_s"],
                "tokens_per_step": made["tokens_per_step_and_row"],
                "depth": None if crowd is None else crowd.best,
                "seconds": None if crowd is None else crowd.seconds,
            }
    return found


def run(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """One case: plain, then with drafts."""
    config, method, more = CASES[case]
    found: dict[str, Any] = {"case": case, "p": options.p, "most": options.most, "rows": {}}
    with tempfile.TemporaryDirectory() as name:
        folder, other = pathlib.Path(name) / "target", pathlib.Path(name) / "drafter"
        for where, what in ((folder, TARGET), (other, config)):
            where.mkdir()
            (where / "config.json").write_text(json.dumps(few_layers(what, options.layers)))
        plain = without_drafts(folder, more, options)
        give_back()
        asked = {**method, "model": str(other), "num_speculative_tokens": options.most}
        for n, made in with_drafts(folder, more, asked, options).items():
            found["rows"][n] = {"plain": plain[n], "ratio": made["drafts"] / plain[n], **made}
            print(case, n, json.dumps(found["rows"][n]), flush=True)
        give_back()
    return found


def main() -> None:
    """Each case by itself: one that fails is told, and the others go on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,256", type=lambda said: [int(n) for n in said.split(",")])
    parser.add_argument("--p", type=float, default=0.7)
    parser.add_argument("--most", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--layers", type=int, default=0, help="0: as many as the models have")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    found = []
    for case in options.cases.split(","):
        try:
            found.append(run(case, options))
        except Exception:
            traceback.print_exc()
            found.append({"case": case, "failed": traceback.format_exc(limit=1)})
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
