"""Experts that move between ranks: the bytes of one process whatever moves and whenever, and ranks that are better
balanced behind it.

TOKENMILL_RELIABILITY=1 adds four ranks and every format."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cpu.engine.engine_ranks_helpers import FULL, NGRAM, requests
from tests.cpu.engine.engines import check_nothing_left, exact, greedy, open_llm, run
from tests.cpu.quant.stored_forms_helpers import FORMS
from tests.cpu.quant.stored_model import MIXTURE, shapes, write

from tokenmill import LLM, SamplingParams
from tokenmill.core.errors import EngineDeadError, ModelError, UserError

pytest.importorskip("tokenmill.parallel.shared_memory", reason="the native kernels were not built")
LONG = pytest.mark.skipif(not FULL, reason="long: set TOKENMILL_RELIABILITY=1")
MOE = Path(__file__).parents[3] / "src" / "tokenmill" / "demo" / "moe"
OFTEN = {"window_size": 8, "step_interval": 8}


def several(ranks: int, redundant: int = 0) -> dict[str, Any]:
    """Experts that are looked at every 8 steps."""
    said = {**OFTEN, "num_redundant_experts": redundant}
    return {"tensor_parallel_size": ranks, "enable_expert_parallel": True, "enable_eplb": True, "eplb_config": said}


def wanted_of(folder: Path, **options: Any) -> list[Any]:
    prompts, params = requests()
    with open_llm(folder, kernels="auto", max_model_len=128, **options) as llm:
        return [exact(output) for output in run(llm, prompts, params)]


def compare(folder: Path, wanted: list[Any], ranks: int, redundant: int, **options: Any) -> LLM:
    """The same requests twice, with chunks, preemption, prefix hits, drafts, a grammar; experts move meanwhile."""
    prompts, params = requests()
    rough = {"long_prefill_token_threshold": 7, "num_blocks": 14, "speculative_config": NGRAM}
    with open_llm(folder, kernels="auto", max_model_len=128, **several(ranks, redundant), **options, **rough) as llm:
        for _ in range(2):
            assert [exact(output) for output in run(llm, prompts, params)] == wanted
        assert llm.engine.balance.moved, "experts have moved"
        assert llm.engine.scheduler.counters.cached_tokens
        check_nothing_left(llm.engine)
    return llm


def test_moving_experts_change_no_byte() -> None:
    wanted = wanted_of(MOE, quantization="int4")
    compare(MOE, wanted, 2, 4, quantization="int4")


def test_moves_balance_ranks_and_a_rank_that_dies_meanwhile_ends_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kind of prompt makes some experts hot: behind the moves ranks have more even counts of tokens."""
    with open_llm(MOE, kernels="auto", max_model_len=128, dtype="bfloat16", **several(2)) as llm:
        # One token again and again, whatever the weights would say: the next steps are like the counted ones.
        prompts = [{"prompt_token_ids": [100] * 6}] * 4
        params = [SamplingParams(temperature=0, max_tokens=17, allowed_token_ids=[100], ignore_eos=True)] * 4
        balance, seen = llm.engine.balance, []
        decide = balance._decide
        monkeypatch.setattr(balance, "_decide", lambda: (decide(), seen.append(balance.balancedness)))
        texts = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
        first = seen[0]
        assert [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)] == texts
        assert balance.moved and max(seen) > first + 0.02, (first, seen)
        executor = llm.engine.executor
        told = executor.control_all

        def dies(message: dict[str, Any]) -> list[dict[str, Any]]:
            if message["what"] == "experts":
                os.kill(executor.ranks[1].process.pid, signal.SIGKILL)
            return told(message)

        monkeypatch.setattr(type(executor), "control_all", lambda self, message: dies(message))
        others = ["1 2 3 4 5 6 7 8 9", "def f(x):", "what is it?", "a b c d"]
        with pytest.raises(EngineDeadError, match="gone"):
            for prompt in others * 4:
                llm.generate([prompt], greedy(40), use_tqdm=False)
        assert all(rank.process.poll() is not None for rank in executor.ranks), "a rank was left behind"


FORMATS = ("float32", "bfloat16", "int8", "int4", "fp8")


def as_format(form: str) -> dict[str, Any]:
    return {"dtype": form} if form in ("float32", "bfloat16") else {"quantization": form}


@LONG
@pytest.mark.parametrize("redundant", [0, 4])
@pytest.mark.parametrize("form", FORMATS)
def test_every_format(form: str, redundant: int) -> None:
    compare(MOE, wanted_of(MOE, **as_format(form)), 2, redundant, **as_format(form))


def plainly(folder: Path, ranks: int, redundant: int, **options: Any) -> None:
    """Of a model without words: the bytes of one process, twice, with chunks and preemption."""
    options = {"kernels": "auto", "skip_tokenizer_init": True, "max_model_len": 64, **options}
    prompts = [[7, 8, 9, 10] * 4, [1, 2], [40, 41, 42] * 5, [9]]
    params = [greedy(24, logprobs=2), SamplingParams(temperature=0.8, seed=3, max_tokens=30, ignore_eos=True)] * 2
    with open_llm(folder, **options) as llm:
        wanted = [exact(output) for output in run(llm, prompts, params)]
    rough = {"long_prefill_token_threshold": 7, "num_blocks": 8}
    with open_llm(folder, **options, **rough, **several(ranks, redundant)) as llm:
        for _ in range(2):
            assert [exact(output) for output in run(llm, prompts, params)] == wanted
        assert llm.engine.balance.moved


def mixture(folder: Path, form: str = "") -> Path:
    """Eight experts that differ, stored in a form or plainly."""
    config = {**MIXTURE, "num_experts": 8}
    write(form or "packed 8", config, folder)
    tensors = load_file(folder / "model.safetensors")
    random = torch.Generator().manual_seed(5)
    for name, tensor in list(tensors.items()):
        found = re.search(r"experts\.(\d+)\.\w+\.(weight|weight_packed|qweight)$", name)
        if found is not None and form:  # other codes in the same form
            bits = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
            tensors[name] = bits.reshape(-1).roll(96 * int(found[1])).view(bits.shape).view(tensor.dtype).contiguous()
    if not form:
        plain = {name: t for name, t in tensors.items() if not re.search(r"(experts\.\d+|self_attn)\.\w+_proj", name)}
        for name, shape in shapes(config).items():
            plain[f"{name}.weight"] = torch.randn(shape, generator=random) * 0.04
        tensors = plain
        (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@LONG
@pytest.mark.parametrize("redundant", [0, 4, 8])
@pytest.mark.parametrize("form", FORMATS)
def test_every_format_over_four_ranks(form: str, redundant: int, tmp_path: Path) -> None:
    plainly(mixture(tmp_path), 4, redundant, **as_format(form))


@LONG
@pytest.mark.parametrize("kv", ["fp8", "int8", "int4"])
def test_every_cache(kv: str) -> None:
    compare(MOE, wanted_of(MOE, kv_cache_dtype=kv), 2, 0, kv_cache_dtype=kv)


@LONG
@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("form", list(FORMS))
def test_every_stored_form(form: str, kernels: str, tmp_path: Path) -> None:
    plainly(mixture(tmp_path, form), 2, 2, kernels=kernels, dtype="bfloat16")


def test_what_experts_that_move_cannot_do_is_refused(tiny: Path) -> None:
    with pytest.raises(UserError, match="needs --enable-expert-parallel"):
        open_llm(tiny, tensor_parallel_size=2, enable_eplb=True)
    with pytest.raises(ModelError, match=r"8 experts and 1 redundant ones do not divide by 2 ranks"):
        open_llm(MOE, kernels="auto", **several(2, 1))
