"""Steps that are filled up to rungs and replayed as graphs give the tokens of steps that are not."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests.cpu.engine.engines import greedy, open_llm, run
from tests.cpu.models.parity import make
from tests.cpu.triton.fake_graph import FakeRecorder

from tokenmill import SamplingParams
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.kernels.triton.kernels import TritonKernels
from tokenmill.runner.graph_maker import GraphMaker
from tokenmill.runner.ragged import RaggedMembers
from tokenmill.runner.recorder import Graphs, Layout, RecordedSteps
from tokenmill.runner.single import SingleTokens
from tokenmill.testing.tiny import make_tiny

PROMPTS = [[5, 6, 7], [9] * 11, [1, 2, 3] * 3]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), hidden=16, heads=2, kv_heads=1, layers=1)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A layer with states, then one with attention."""
    hf = pytest.importorskip("transformers")
    config = hf.Qwen3_5TextConfig(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, linear_num_key_heads=1,
        linear_num_value_heads=2, linear_key_head_dim=4, linear_value_head_dim=4,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("hybrid")
    make(config, folder)
    return folder


def tokens(folder: pathlib.Path, options: dict, *, recorded: bool, warm: bool = False) -> tuple[list, list[Graphs]]:
    """What the Triton kernels answer -> tokens, recordings."""
    made = {"max_num_seqs": 3, "max_model_len": 32, "kv_cache_memory_bytes": 1 << 20, "enforce_eager": True}
    with open_llm(folder, **made, **options) as llm:
        runner = llm.engine.executor.runner
        kernels = runner.kernels = TritonKernels()
        layouts: list[Layout] = [
            SingleTokens(runner.model, kernels, runner.rows, runner.pool, exact=False),
            RaggedMembers(runner.model, kernels, runner.rows, runner.pool),
        ]
        graphs = [Graphs(kernels, FakeRecorder()) for _ in layouts]
        if recorded:
            runner.recorders = [RecordedSteps(*pair) for pair in zip(layouts, graphs, strict=True)]
        if warm:
            layouts[1].tokens = layouts[1].tokens[:1]
            layouts[0].ladder = [1, 3]
            runner.warm()
            assert len(graphs[0].made) == 3, "and rows that share a prefix"
            assert len(graphs[1].made) == 1
        found = [o.outputs[0].token_ids for o in run(llm, PROMPTS, [greedy(2 + 2 * i) for i in range(3)])]
        sampled = SamplingParams(temperature=1.0, seed=4, max_tokens=3, ignore_eos=True, logprobs=1)
        found += [o.outputs[0].token_ids for o in run(llm, PROMPTS[:1], sampled)]
        return found, graphs


DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}, "depth": 2}
"""Of the device."""
STATES = {"skip_tokenizer_init": True, "block_size": 4}


@pytest.fixture(scope="module")
def of_tiny(tiny: pathlib.Path) -> list:
    """What it says where nothing is recorded, drafted or cut."""
    return tokens(tiny, {}, recorded=False)[0]


@pytest.fixture(scope="module")
def of_hybrid(hybrid: pathlib.Path) -> list:
    return tokens(hybrid, STATES, recorded=False)[0]


def test_the_same_tokens(tiny: pathlib.Path, of_tiny: list) -> None:
    found, (_, ragged) = tokens(tiny, DRAFTS, recorded=True)
    assert found == of_tiny and ragged.made


def test_states_go_on_once(hybrid: pathlib.Path, of_hybrid: list) -> None:
    found, (single, ragged) = tokens(hybrid, {**STATES, "max_num_batched_tokens": 8}, recorded=True)
    assert found == of_hybrid
    assert ragged.made and single.made


def test_drafts_over_states(hybrid: pathlib.Path, of_hybrid: list) -> None:
    """Nearly all of these drafts are wrong, so that rows go back to states that recordings left."""
    found, (_, ragged) = tokens(hybrid, {**STATES, **DRAFTS}, recorded=True)
    assert found == of_hybrid and ragged.made


def test_recorded_ahead(tiny: pathlib.Path, of_tiny: list) -> None:
    assert tokens(tiny, {}, recorded=True, warm=True)[0] == of_tiny


@pytest.mark.parametrize("objects", [False, True])
def test_only_what_has_to_runs_before_it_is_recorded(tiny: pathlib.Path, objects: bool) -> None:
    """The first of a kind, and what cannot be recorded otherwise, as where memory would be taken that is kept."""
    with open_llm(tiny, max_num_seqs=3, enforce_eager=True) as llm:
        runner, runs = llm.engine.executor.runner, []
        kernels, forward = TritonKernels(), runner.model.forward
        layout = SingleTokens(runner.model, kernels, runner.rows, runner.pool, exact=False)

        class Counted(FakeRecorder):
            def record(self, compute):
                before = len(runs)
                if objects and not before % 2:  # nothing ran since the last recording
                    raise RuntimeError("scratch is taken before steps are recorded")
                return super().record(compute)

        def counted(tokens, ctx):
            runs.append(len(tokens))
            return forward(tokens, ctx)

        runner.model.forward = counted
        steps = RecordedSteps(layout, Graphs(kernels, Counted()))
        with torch.inference_mode():
            steps.warm()
        keys = list(layout.ahead())
        assert len(steps.recordings.made) == len(keys) > 2
        assert len(runs) == (2 * len(keys) if objects else 1 + len(keys))


def test_a_model_that_waits_for_its_device_is_not_recorded(tiny: pathlib.Path) -> None:
    with open_llm(tiny, enforce_eager=True) as llm:
        runner = llm.engine.executor.runner
        kernels = ReferenceKernels()
        layout = RaggedMembers(runner.model, kernels, runner.rows, runner.pool)
        steps = RecordedSteps(layout, Graphs(kernels, FakeRecorder()))
        with torch.inference_mode():
            steps.warm()
        assert not steps.recordings.possible
        assert not steps.recordings.made


def test_what_is_read_while_recording_stays(tiny: pathlib.Path) -> None:
    """The fake graph must not hide a number that a real graph would have baked in."""
    state, seen = torch.tensor([1, 2, 3]), torch.zeros(3, dtype=torch.int64)

    def compute() -> torch.Tensor:
        seen.copy_(state * 2)
        return seen + int(state[0])  # read by the host

    recording = FakeRecorder().record(compute)
    state.copy_(torch.tensor([10, 20, 30]))
    assert recording.replay().tolist() == [21, 41, 61]


def test_ranks_record_the_same() -> None:
    """If one of two ranks has to run a piece of work before it can record it, both do: the work has sums."""
    sums, votes, said = threading.Barrier(2, timeout=60), threading.Barrier(2, timeout=60), [True, True]

    def rank(number: int) -> list[str]:
        ran: list[str] = []

        class Recording(FakeRecorder):
            def record(self, compute: Callable[[], Any]) -> Any:
                if number and ran[-1:] != ["run"]:
                    raise RuntimeError("scratch is taken before steps are recorded")
                ran.append("recorded")
                return object()

        def work() -> None:
            sums.wait()
            ran.append("run")

        def on_all(so: bool) -> bool:
            said[number] = so
            votes.wait()
            answer = all(said)
            votes.wait()
            return answer

        maker = GraphMaker(ReferenceKernels(), Recording(), on_all)
        for _ in range(2):
            assert maker.record_work(work, "kind") is not None
        return ran

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(rank, range(2))
    assert second == ["run", "recorded"] * 2
    assert first == ["run", "recorded", "recorded", "run", "recorded"]
