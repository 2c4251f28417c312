"""Layers shared out in stages: the bytes of one process in every mode, one numbering of blocks, what is refused.

TOKENMILL_RELIABILITY=1 adds every family over ranks and stages, three stages, stages of two ranks, formats, and lost
stages."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cpu.engine.engine_ranks_helpers import FULL, NGRAM, compare, lose
from tests.cpu.engine.engines import check_nothing_left, exact, greedy, open_llm, run
from tests.cpu.models.families_helpers import CASES
from tests.cpu.models.family_cases import ALL, FAMILIES
from tests.cpu.quant.stored_forms_helpers import FORMS
from tests.cpu.quant.stored_model import DENSE, MIXTURE, write

from tokenmill import SamplingParams
from tokenmill.compute.forward import KVFormat, KVSpec
from tokenmill.core.errors import ModelError, UserError
from tokenmill.core.step import BlockCopy, StepPlan, TableEdit
from tokenmill.kvcache.stages import StageReport, lay_out_stage
from tokenmill.parallel.stages import Place, cut
from tokenmill.runner.stage import FromInbox
from tokenmill.testing.tiny import make_tiny

ONLY = os.environ.get("TOKENMILL_ONLY", "").split()
"""Of the long list."""
LONG = pytest.mark.skipif(not FULL, reason="long: set TOKENMILL_RELIABILITY=1")


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five layers, which no number of stages divides, and a tied head."""
    return make_tiny(tmp_path_factory.mktemp("deep"), layers=5, hidden=32, heads=4, kv_heads=2)


def same(folder: Path, several: dict[str, Any], *, drafts: bool = True, plain: bool = False, **options: Any) -> None:
    """Token ids below 67, plainly and in chunks, with too few blocks, drafts and shared beginnings."""
    options = {"skip_tokenizer_init": True, "max_model_len": 100, "block_size": 4, "kernels": "auto", **options}
    shared = [7, 8, 9, 10] * 6
    prompts = [[*shared, 3], [*shared, 5, 6], [1, 2], [40, 41, 42] * 9, [9], [*shared, 5, 6, 1]]
    params = [
        greedy(24, logprobs=3, prompt_logprobs=1),
        greedy(24, logprobs=3),
        SamplingParams(temperature=0.9, seed=4, top_p=0.9, max_tokens=20, ignore_eos=True, logprobs=2, n=2),
        greedy(24, repetition_penalty=1.2, logprobs=2),
        SamplingParams(temperature=0.7, seed=5, max_tokens=24, ignore_eos=True),
        greedy(24, logprobs=1),
    ]
    with open_llm(folder, **options) as llm:
        wanted = [exact(output) for output in run(llm, prompts, params)]
        groups = len(llm.engine.scheduler.tables.layouts)
    rough = {
        "long_prefill_token_threshold": 7,
        "num_blocks": 26 * groups,
        **({"speculative_config": NGRAM} if drafts else {}),
    }
    with open_llm(folder, **several, **options, **rough) as llm:
        for _ in range(2):
            assert [exact(output) for output in run(llm, prompts, params)] == wanted
        assert llm.engine.scheduler.counters.cached_tokens
        check_nothing_left(llm.engine)
    if plain:
        with open_llm(folder, **several, **options) as llm:
            assert [exact(output) for output in run(llm, prompts, params)] == wanted


def test_two_stages_give_the_bytes_of_one(deep: Path) -> None:
    compare(deep, 1, dtype="bfloat16", pipeline_parallel_size=2)


def test_stages_of_attention_and_states_give_the_bytes_of_one(tmp_path: Path) -> None:
    CASES["qwen3-next"].make(tmp_path)
    same(tmp_path, {"pipeline_parallel_size": 2}, drafts=False, dtype="bfloat16")


@LONG
@pytest.mark.parametrize("ways", [(3, 1), (2, 2), (5, 1)])
def test_more_stages_and_ranks_in_them(ways: tuple[int, int], deep: Path) -> None:
    compare(deep, ways[1], dtype="bfloat16", pipeline_parallel_size=ways[0])


NAMES = [name for name in FAMILIES if not ONLY or name in ONLY]


def family(name: str, folder: Path) -> bool:
    """Write its first case; -> can its rows try drafts?"""
    _, config, _ = ALL[f"{name}-0"].make(folder)
    text = str(config)
    return not any(word in text for word in ("linear_attention", "mamba", "conv_L_cache", "'conv'", "state_size"))


@LONG
@pytest.mark.parametrize("name", NAMES)
def test_every_family_in_stages(name: str, tmp_path: Path) -> None:
    if name in ("gemma3n", "gemma4", "hy_v4", "zamba2"):
        family(name, tmp_path)
        with pytest.raises(ModelError, match=r"(Gemma \w+|Hy4|Zamba 2) cannot be split in stages"):
            open_llm(tmp_path, pipeline_parallel_size=2, skip_tokenizer_init=True, max_model_len=128, kernels="auto")
        return
    drafts = family(name, tmp_path)
    plain = name in ("qwen3", "qwen3_moe", "qwen3_next")
    same(tmp_path, {"pipeline_parallel_size": 2}, drafts=drafts, plain=plain, dtype="bfloat16")


@LONG
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_every_family_over_ranks(name: str, ranks: int, tmp_path: Path) -> None:
    drafts = family(name, tmp_path)
    if name in ("bloom", "laguna", "mpt") and ranks == 4:
        with pytest.raises(ModelError, match=r"--tensor-parallel-size: [26] heads or columns cannot be split over 4"):
            open_llm(tmp_path, tensor_parallel_size=ranks, skip_tokenizer_init=True, kernels="auto")
        return
    same(tmp_path, {"tensor_parallel_size": ranks}, drafts=drafts, dtype="bfloat16")


WAYS = [{"tensor_parallel_size": 2}, {"tensor_parallel_size": 4}, {"pipeline_parallel_size": 2}]


@LONG
@pytest.mark.parametrize("form", ["int8", "int4", "int4-g32", "fp8"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("several", WAYS)
def test_every_format(name: str, form: str, several: dict[str, Any], tmp_path: Path) -> None:
    family(name, tmp_path)
    same(tmp_path, several, quantization=form)


@LONG
@pytest.mark.parametrize("config", [DENSE, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("form", [form for form in FORMS if not ONLY or form in ONLY])
@pytest.mark.parametrize("several", WAYS[:2])
def test_every_stored_form(form: str, config: dict[str, Any], several: dict[str, Any], tmp_path: Path) -> None:
    same(write(form, config, tmp_path), several, dtype="bfloat16", max_model_len=64)


MIXTURES = [name for name in NAMES if "num_experts_per_tok" in str(ALL[f"{name}-0"].config) or "moe" in name]


@LONG
@pytest.mark.parametrize("name", MIXTURES)
def test_every_mixture_by_experts(name: str, tmp_path: Path) -> None:
    drafts = family(name, tmp_path)
    try:
        same(tmp_path, {"tensor_parallel_size": 2, "enable_expert_parallel": True}, drafts=drafts, dtype="bfloat16")
    except ModelError as error:
        pytest.skip(f"refused: {error}")


@LONG
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_stage_ends_its_engine(rank: int, how: signal.Signals, tiny: Path) -> None:
    with open_llm(tiny, pipeline_parallel_size=2, kernels="auto", max_model_len=512) as llm:
        lose(llm, rank, how)


def test_borders_balance_what_layers_weigh() -> None:
    assert cut([1.0] * 4, 0.0, 2) == [0, 2, 4]
    assert cut([1.0] * 5, 1.0, 2) == [0, 3, 5]
    assert cut([1.0] * 4, 2.0, 3) == [0, 2, 3, 4] or cut([1.0] * 4, 2.0, 3) == [0, 1, 3, 4]
    assert cut([5.0, 1.0, 1.0, 1.0], 0.0, 2) == [0, 1, 4]
    assert cut([1.0, 1.0], 9.0, 2) == [0, 1, 2]


def test_a_stage_has_a_layer_at_least() -> None:
    with pytest.raises(ModelError, match="2 layers, fewer than stages"):
        Place(0, 3).layers([1.0, 1.0], 0.0)


def test_stages_number_blocks_alike() -> None:
    """Groups share a pool only where every stage has equally large pages of both; plans number them as a whole."""
    full, window = KVSpec("full", 2, 8, 8), KVSpec("window", 2, 8, 8, 16)
    every = [
        StageReport((full, window), False),
        StageReport((window, window, full), False),
        StageReport((KVSpec("full", 1, 16, 16),), True),
    ]
    first, second, third = (lay_out_stage(every, stage, 4, KVFormat("float32")) for stage in range(3))
    assert first.groups == second.groups == third.groups
    assert [group.pool for group in first.groups] == [0, 1], "their pages differ in the second stage"
    assert second.own == {1: 0, 0: 1} or second.own == {0: 0, 1: 1}
    assert first.everywhere([5, 6], 99) == [5, 6] and third.everywhere([7], 99) == [7, 99]
    for stage in (first, second):
        for number, own in stage.own.items():
            assert stage.cache.group_specs[own] == (full, window)[number]
            assert stage.here([10, 20])[stage.cache.groups[own].pool] == (10, 20)[first.groups[number].pool]
    plan = StepPlan(id=0, edits=[TableEdit(0, g, 0, 0, [1], [0]) for g in (0, 1)], copies=[BlockCopy(1, 2, 3)])
    third.translate(plan)
    assert [edit.group for edit in plan.edits] == [0] and not plan.copies


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"enable_expert_parallel": True}, "which is 1"),
    ],
)
def test_what_stages_cannot_do_is_refused(options: dict[str, Any], said: str, tiny: Path) -> None:
    with pytest.raises(UserError, match=said):
        open_llm(tiny, **{"pipeline_parallel_size": 2, **options})


def test_a_later_stage_begins_with_an_ordinary_launch_on_a_gpu():
    """There the step's tensors may still be on their way when the first kernels start; a CPU needs no copy."""

    class Kept:
        spec = None

        def forward(self, x, ctx):
            return x

    for device in ("cpu", "meta"):
        inbox = torch.zeros(8, 4, device=device)
        x = FromInbox(Kept(), inbox).forward(torch.zeros(3, device=device), None)
        assert x.shape == (3, 4)
        assert (x._base is inbox) == (device == "cpu")
