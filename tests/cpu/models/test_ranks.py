"""Weights split over ranks give what one rank gives, in an exact group the same bytes. The ranks are threads here."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cpu.models.families_helpers import CASES, prompt
from tests.cpu.models.family_cases import ALL
from tests.cpu.models.parity import DictCheckpoint, load, make, ours
from tests.cpu.models.ranks_helpers import Shared, ThreadGroup
from tests.cpu.quant.stored_model import DENSE, MIXTURE
from tests.cpu.quant.stored_model import make as make_stored
from torch import Tensor

from tokenmill.core.errors import ModelError
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.models.registry import build_model
from tokenmill.parallel.shared_memory import Memory, SharedGroup
from tokenmill.parallel.stages import Place

EVERY = {**CASES, **ALL}
NATIVE = pytest.importorskip("tokenmill.kernels.cpu", reason="the native kernels were not built")


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("qwen2", 2), ("qwen2", 4), ("qwen3-moe", 2), ("mixtral", 4), ("phi3", 2), ("gpt2", 2), ("bloom", 2), ("opt", 4),
     ("falcon-7b", 2), ("falcon-40b", 4), ("gpt-neox", 2), ("deepseek-v2", 2), ("gpt-oss", 2), ("gemma3", 2),
     ("glm_moe_dsa-1", 2), ("axk1-0", 2), ("axk2-0", 2), ("laguna-0", 2), ("mimo_v2_flash-0", 2),
     ("longcat_flash-0", 2), ("hy_v4-1", 2), ("hy_v4-2", 4)],
)  # fmt: skip
def test_ranks_give_what_one_gives(name, ranks, tmp_path):
    case = EVERY[name]
    _, config, tensors = make(case.config, tmp_path)
    prompts, steps = {"a": prompt(40)}, [[("a", 30)], [("a", 10)]]
    alone = ours(load(config, tensors), prompts, steps)["a"]
    shared = Shared(ranks)

    def run(rank: int) -> Tensor:
        with torch.no_grad():
            return ours(load(config, tensors, group=ThreadGroup(shared, rank)), prompts, steps)["a"]

    with ThreadPoolExecutor(ranks) as pool:
        results = list(pool.map(run, range(ranks)))
    for result in results:
        assert (result - alone).abs().max() <= 1e-4


JOINED = {"qwen2": 2, "mixtral": 2, "falcon-40b": 1, "gemma2": 2, "opt-350m": 2, "minicpm3-0": 2,
          "mamba2-0": 1, "granite-0": 2, "gemma4-0": 1}  # fmt: skip
"""How often a layer's sums come with the norm that follows; Gemma 4 multiplies by a number before the other one."""


@pytest.mark.parametrize("name", JOINED)
def test_a_sum_over_ranks_comes_with_the_norm_that_reads_it(name, tmp_path):
    case = ({**ALL, **CASES})[name]
    _, config, tensors = case.make(tmp_path)
    prompts, steps = {"a": prompt(40)}, [[("a", 30)], [("a", 10)]]
    alone = ours(load(config, tensors), prompts, steps)["a"]
    found = {}
    for joins in (True, False):
        shared = Shared(2)
        groups = [ThreadGroup(shared, rank, joins) for rank in range(2)]

        def run(group: ThreadGroup) -> Tensor:
            with torch.no_grad():
                return ours(load(config, tensors, group=group), prompts, steps)["a"]

        with ThreadPoolExecutor(2) as pool:
            found[joins] = list(pool.map(run, groups))
        assert groups[0].joined == (len(steps) * JOINED[name] * config["num_hidden_layers"] if joins else 0)
        assert name.startswith("gemma4") or not joins or groups[0].sums <= len(steps), "embeddings alone"
    for one, other in zip(found[True], found[False], strict=True):
        assert torch.equal(one, other), "the same order of additions, whoever makes them"
        assert (one - alone).abs().max() <= 1e-4


PIECEWISE = ("qwen2", "phi3", "gpt2", "smollm3-0", "gemma2", "gemma3", "granite-0")


@pytest.mark.parametrize("name", [*PIECEWISE, "mixtral", "falcon-7b"])
def test_sums_in_pieces_are_those_made_at_once(name, tmp_path):
    """Where the block ahead treats rows one by one; others are left as they are."""
    _, config, tensors = ({**ALL, **CASES})[name].make(tmp_path)
    prompts, steps = {"a": prompt(40), "b": prompt(9)}, [[("a", 29), ("b", 4)], [("a", 10), ("b", 1)], [("a", 1)]]
    found = {}
    for most in (1, 3):
        groups = [ThreadGroup(shared, rank, most_pieces=most) for shared in (Shared(2),) for rank in range(2)]

        def run(group: ThreadGroup) -> dict[str, Tensor]:
            with torch.no_grad():
                return ours(load(config, tensors, group=group), prompts, steps)

        with ThreadPoolExecutor(2) as pool:
            found[most] = list(pool.map(run, groups))
        a_layer = 2 * (3 + 3) if name in PIECEWISE and most > 1 else 0  # two steps are long enough
        assert groups[0].sent == a_layer * config["num_hidden_layers" if name != "gpt2" else "n_layer"]
    for one, other in zip(found[1], found[3], strict=True):
        assert all(torch.equal(one[of], other[of]) for of in one)


@pytest.fixture
def memory():
    """Makes the memory that ranks share."""
    made: list[Memory] = []

    def make_one(size: int) -> Memory:
        made.append(Memory(size))
        return made[-1]

    yield make_one
    for each in made:
        each.close()


FORMS = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    **{form: {"quantization": form} for form in ("int8", "int4", "fp8")},
}
PLAIN = ("qwen2", "qwen3-moe", "mixtral", "phi3", "gpt2", "falcon-40b", "deepseek-v2", "gpt-oss")
NARROW = ("qwen2", "qwen3-moe", "deepseek-v2")
EXACT = [(name, form) for name in PLAIN for form in ("float32", "bfloat16")]
EXACT += [(name, form) for name in NARROW for form in ("int8", "int4", "fp8")]
EXACT += [("deepseek_v32-0", "float32"), ("glm_moe_dsa-1", "bfloat16"), ("deepseek_v32-0", "int4")]
EXACT += [(name, "bfloat16") for name in ("axk2-0", "laguna-0", "mimo_v2_flash-0", "longcat_flash-0", "hy_v4-1")]
EXACT += [("hy_v4-0", "float32"), ("hy_v4-0", "int8")]


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize(("name", "form"), EXACT)
def test_exact_ranks_give_the_bytes_of_one(name, form, backend, tmp_path, memory):
    _, config, tensors = make(EVERY[name].config, tmp_path)
    prompts, steps = {"a": prompt(40)}, [[("a", 30)], [("a", 10)]]
    shared = memory(2)

    def answers(**more: Any) -> Tensor:
        kernels = NATIVE.CpuKernels(1) if backend == "native" else ReferenceKernels()
        dtype = FORMS[form].get("dtype", torch.float32)
        with torch.no_grad():
            model = load(config, tensors, kernels=kernels, **FORMS[form], **more)
            return ours(model, prompts, steps, kernels, dtype=dtype)["a"]

    alone = answers()
    with ThreadPoolExecutor(2) as pool:
        for result in pool.map(lambda rank: answers(group=SharedGroup(shared.file, rank, 2)), range(2)):
            assert torch.equal(result, alone)


STATES = (
    "qwen3-next",
    "mamba-0",
    "mamba2-2",
    "jamba-0",
    "falcon_h1-2",
    "lfm2-0",
    "olmo_hybrid-1",
    "kimi_linear-0",
    "bailing_hybrid-0",
    "minimax-0",
    "zamba2-0",
    "recurrent_gemma-1",
    "gemma4-0",
    "gemma3n-0",
)
"""Heads or channels with states, norms over all of them and within; keys that two layers share."""


@pytest.mark.parametrize(("ranks", "exact"), [(4, True), (2, False)])
@pytest.mark.parametrize("name", STATES)
def test_layers_with_states_are_split(name, ranks, exact, tmp_path, memory):
    _, config, tensors = ({**ALL, **CASES})[name].make(tmp_path)
    prompts, steps = {"a": prompt(40)}, [[("a", 30)], [("a", 10)]]
    dtype = torch.bfloat16 if exact else torch.float32
    shared, threads = memory(ranks), Shared(ranks)
    sizes: dict[int, int] = {}

    def answers(rank: int, **more: Any) -> Tensor:
        kernels = NATIVE.CpuKernels(1)
        with torch.no_grad():
            model = load(config, tensors, kernels=kernels, dtype=dtype, **more)
            sizes[rank] = sum(int(torch.Size(shape).numel()) for spec in model.spec.states for _, shape in spec.parts)
            return ours(model, prompts, steps, kernels, dtype=dtype)["a"]

    def share(rank: int) -> Tensor:
        return answers(rank, group=SharedGroup(shared.file, rank, ranks) if exact else ThreadGroup(threads, rank))

    alone = answers(-1)
    with ThreadPoolExecutor(ranks) as pool:
        for result in pool.map(share, range(ranks)):
            assert torch.equal(result, alone) if exact else (result - alone).abs().max() <= 1e-4
    if not name.startswith("gemma"):
        assert max(sizes[rank] for rank in range(ranks)) < 0.8 * sizes[-1], "a rank keeps its part of the states"


FORMS_OF_FILES = ("gptq 4", "awq gemm", "fp8 blocks", "mxfp4", "nf4", "nvfp4")


@pytest.mark.parametrize("form", FORMS_OF_FILES)
def test_exact_ranks_of_stored_forms_give_the_bytes_of_one(form, memory):
    said, tensors = make_stored(form, MIXTURE)
    prompts, steps = {"a": prompt(20)}, [[("a", 15)], [("a", 5)]]
    shared = memory(2)

    def answers(**more: Any) -> Tensor:
        kernels = NATIVE.CpuKernels(1)
        with torch.no_grad():
            model = load(said, dict(tensors), kernels=kernels, dtype=torch.bfloat16, **more)
            return ours(model, prompts, steps, kernels, dtype=torch.bfloat16)["a"]

    alone = answers()
    assert alone.isfinite().all()
    with ThreadPoolExecutor(2) as pool:
        for result in pool.map(lambda rank: answers(group=SharedGroup(shared.file, rank, 2)), range(2)):
            assert torch.equal(result, alone)


MIXTURES = ("qwen3-moe", "mixtral", "deepseek-v2", "gpt-oss", "longcat_flash-0", "hy_v4-0")


@pytest.mark.parametrize(("name", "redundant"), [*((name, None) for name in MIXTURES), ("longcat_flash-0", 2)])
def test_ranks_with_whole_experts_give_what_one_gives(name, redundant, tmp_path):
    _, config, tensors = make(EVERY[name].config, tmp_path)
    prompts, steps = {"a": prompt(40)}, [[("a", 30)], [("a", 10)]]
    alone = ours(load(config, tensors), prompts, steps)["a"]
    shared = Shared(2)

    def run(rank: int) -> Tensor:
        with torch.no_grad():
            place = Place(whole_experts=True, redundant=redundant)
            model = load(config, tensors, group=ThreadGroup(shared, rank), place=place)
            return ours(model, prompts, steps)["a"]

    with ThreadPoolExecutor(2) as pool:
        for result in pool.map(run, range(2)):
            assert (result - alone).abs().max() <= 1e-4


@pytest.mark.parametrize("form", ["bfloat16", "int4"])
@pytest.mark.parametrize("name", MIXTURES)
def test_exact_ranks_with_whole_experts_give_the_bytes_of_one(name, form, tmp_path, memory):
    compare_whole_experts(EVERY[name].config, form, 2, tmp_path, memory)


@pytest.mark.parametrize("experts", [5, 7])
def test_whole_experts_that_do_not_divide_give_the_bytes_of_one(experts, tmp_path, memory):
    config = copy.deepcopy(CASES["qwen3-moe"].config)
    config.num_experts, config.num_attention_heads, config.num_key_value_heads = experts, 6, 3
    config.hidden_size, config.head_dim = 48, 8
    compare_whole_experts(config, "float32", 3, tmp_path, memory)


def compare_whole_experts(given: Any, form: str, size: int, tmp_path: Path, memory: Any) -> None:
    _, config, tensors = make(given, tmp_path)
    prompts, steps = {"a": prompt(40)}, [[("a", 30)], [("a", 10)]]
    shared = memory(size)

    def answers(**more: Any) -> Tensor:
        kernels = NATIVE.CpuKernels(1)
        with torch.no_grad():
            model = load(config, tensors, kernels=kernels, **FORMS[form], **more)
            return ours(model, prompts, steps, kernels, dtype=FORMS[form].get("dtype", torch.float32))["a"]

    alone = answers()
    with ThreadPoolExecutor(size) as pool:
        ranks = pool.map(
            lambda rank: answers(group=SharedGroup(shared.file, rank, size), place=Place(whole_experts=True)),
            range(size),
        )
        for result in ranks:
            assert torch.equal(result, alone)


class Reading(DictCheckpoint):
    """Counts the bytes that are asked for: of each tensor the last time, as types are looked at before."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.read: dict[str, int] = {}

    @property
    def bytes(self):
        return sum(self.read.values())

    def tensor(self, name, shape=None, dtype=None):
        self.read[name] = self.tensors[name].nbytes
        return super().tensor(name, shape, dtype)

    def part(self, name, dim, start, stop, shape=None, dtype=None):
        found = self.tensors[name].narrow(dim, start, stop - start)
        self.read[name] = found.nbytes
        return found if dtype is None else found.to(dtype)


@pytest.mark.parametrize("whole_experts", [False, True])
@pytest.mark.parametrize("name", ["qwen2", "qwen3-moe"])
def test_a_rank_reads_its_part_alone(name, whole_experts, tmp_path):
    _, config, tensors = make(CASES[name].config, tmp_path)
    whole = sum(tensor.nbytes for tensor in tensors.values())
    read = Reading(tensors)
    build_model(config, read, dtype=torch.float32, device="cpu", kernels=ReferenceKernels(),
                group=ThreadGroup(Shared(2), 1), place=Place(whole_experts=whole_experts))  # fmt: skip
    alone = sum(t.nbytes for n, t in tensors.items() if "norm" in n or n.endswith((".gate.weight", "mlp.gate.weight")))
    vocab = sum(t.nbytes for n, t in tensors.items() if t.shape[0] == config["vocab_size"])
    assert read.bytes <= (whole - alone - vocab) / 2 + alone + vocab, "67 tokens are not split over two ranks"


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("form", ["gptq 8", "awq gemm", "packed 4 zero", "fp8 blocks", "mxfp4", "nvfp4"])
def test_a_rank_reads_its_part_of_stored_forms(form, exact, memory):
    said, tensors = make_stored(form, DENSE)
    whole = sum(tensor.nbytes for name, tensor in tensors.items() if "proj" in name)
    other = sum(tensor.nbytes for name, tensor in tensors.items() if "proj" not in name)
    group = SharedGroup(memory(2).file, 1, 2) if exact else ThreadGroup(Shared(2), 1)
    read = Reading(tensors)
    build_model(said, read, dtype=torch.bfloat16, device="cpu", kernels=NATIVE.CpuKernels(1), group=group)
    assert read.bytes <= other + (0.51 if exact or "gptq" not in form else 0.8) * whole, "columns of GPTQ have an order"


def test_heads_that_do_not_divide_are_refused(tmp_path):
    _, config, tensors = make(CASES["qwen2"].config, tmp_path)
    with pytest.raises(ModelError, match="4 heads"):
        load(config, tensors, group=ThreadGroup(Shared(3), 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_larger_than_what_is_exchanged_at_a_time(dtype, memory):
    shared = memory(2)
    x = torch.randn(2, 5, 120, 4096).to(dtype)  # in 16 bits more than a slot has
    beside = torch.randn(5, 120, 4096).to(dtype)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda rank: SharedGroup(shared.file, rank, 2).all_reduce(x[rank], beside), range(2)))
    wanted = (x[0].float() + x[1].float() + beside.float()).to(dtype)
    assert all(torch.equal(each, wanted) for each in found)


def _gather(group: SharedGroup, rank: int, *shapes: tuple[int, ...]) -> Tensor:
    return group.all_gather(torch.ones(shapes[rank]))


DIFFERENT = {
    ("rank 0 3 rows of 32 bytes", "rank 1 4 rows of 32 bytes"): lambda group, rank: _gather(
        group, rank, (3, 8), (4, 8)
    ),
    ("rank 0 3 rows of 32 bytes", "rank 1 3 rows of 36 bytes"): lambda group, rank: _gather(
        group, rank, (3, 8), (3, 9)
    ),
    ("rank 0 3 numbers of 4", "rank 1 4 numbers of 4"): lambda group, rank: group.all_reduce(torch.ones(3 + rank)),
    ("rank 0 4 numbers of 4", "rank 1 4 numbers of 2"): lambda group, rank: group.all_reduce(
        torch.ones(4, dtype=(torch.float32, torch.bfloat16)[rank])
    ),
    ("rank 0 4 rows of 4", "rank 1 4 numbers of 4"): lambda group, rank: (group.all_gather, group.all_reduce)[rank](
        torch.ones(4, 1)
    ),
}


@pytest.mark.parametrize("said", DIFFERENT, ids=lambda said: " ".join(said))
def test_ranks_that_exchange_different_things_are_told(said, memory):
    """The bytes of one would be taken for something else in silence. The next epoch begins anew."""
    shared, both = memory(2), threading.Barrier(2, timeout=60)

    def ask(rank: int) -> None:
        group = SharedGroup(shared.file, rank, 2)
        for epoch in (1, 2):
            group.begin(epoch)
            assert group.all_gather(torch.full((2,), rank + 1.0)).tolist() == [1.0, 1.0, 2.0, 2.0]
            with pytest.raises(RuntimeError, match="ranks exchange different things") as told:
                DIFFERENT[said](group, rank)
            assert all(part in str(told.value) for part in said)
            group.fail()
            both.wait()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(ask, range(2)))
