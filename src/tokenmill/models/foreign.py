"""Families that are not written here, as Transformers has them. Owns: building such a model, lending it paged
attention, and the proof at every load that it then says what it says by itself.

Transformers computes everything but attention: its attention interface calls ours, which stores keys and values in
pages. A short prompt is computed by Transformers alone and by this way, in pieces; a model whose answers differ (one
with states, masks or caches of its own) keeps Transformers' caches (`foreign_caches.py`), or is refused. Nothing is
recorded, products are Transformers' own, and a row's bytes may depend on the rows beside it. Code that comes with a
model is never run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.forward import (
    AttentionSpec,
    ForwardContext,
    GroupPlan,
    KVSpec,
    KVView,
    StepRows,
)
from tokenmill.core.errors import ModelError
from tokenmill.layers.build import Build
from tokenmill.models.foreign_caches import OwnCaches, prove_own_caches
from tokenmill.models.foreign_parts import Halves, Stub, check_equal, divide, failing_as, whole

NAME = "tokenmill"
"""The name of our attention in Transformers' interface."""
PIECES = (10, 1, 13)
"""How the test prompt is cut: the number of tokens in each piece."""
MORE_PIECES = (*PIECES, 1, 1, 37, 1, 32)
"""How a longer one is cut for models with caches of their own: whatever these forget, or choose among, shows later."""


def can_build(config: dict[str, Any]) -> bool:
    """Is Transformers installed, and does it have a causal model of this type?"""
    if importlib.util.find_spec("transformers") is None:
        return False
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = config.get("model_type")
    return isinstance(kind, str) and kind in CONFIG_MAPPING and kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


@dataclass(slots=True)
class Host:
    """What the attention layers of one model share: the current step, and each layer's description."""

    specs: dict[int, AttentionSpec] = field(default_factory=dict)
    kv: list[KVSpec] = field(default_factory=list)
    ctx: ForwardContext | None = None
    looking: bool = False

    def attend(self, module: Any, q: Tensor, k: Tensor, v: Tensor, said: dict[str, Any]) -> Tensor:
        """q [1, H, T, D], k and v [1, Hkv, T, D] -> [1, T, H, Dv]."""
        if self.looking:
            self._note(module, q, k, v, said)
            return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])
        assert self.ctx is not None, "a step is being computed"
        spec = self.specs[id(module)]
        qkv = torch.cat([part[0].transpose(0, 1).flatten(1) for part in (q, k, v)], dim=-1)
        found = self.ctx.kernels.attend(qkv, spec, self.ctx)
        return found.view(1, q.shape[2], q.shape[1], -1)

    def _note(self, module: Any, q: Tensor, k: Tensor, v: Tensor, said: dict[str, Any]) -> None:
        if id(module) in self.specs:
            raise ModelError("an attention layer is called several times")
        if said.get("mask") is not None:
            raise ModelError("attention has a mask of its own")
        if said.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            raise ModelError("attention looks ahead")
        if q.shape[0] != 1 or q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
            raise ModelError("attention keeps other positions than those of its input")
        window = said.get("sliding_window") or 0
        kv = KVSpec("window" if window else "full", k.shape[1], k.shape[3], v.shape[3], int(window))
        self.kv.append(kv)
        scale = said.get("scaling")
        self.specs[id(module)] = AttentionSpec(
            layer=len(self.kv) - 1, group=list(dict.fromkeys(self.kv)).index(kv), heads=q.shape[1], kv=kv,
            scale=q.shape[3] ** -0.5 if scale is None else float(scale), softcap=float(said.get("softcap") or 0.0),
            sinks=said.get("s_aux"), window=int(window),
        )  # fmt: skip


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **said: Any
) -> tuple[Tensor, None]:
    """The attention function that Transformers calls."""
    return module.tokenmill_host.attend(module, query, key, value, {"mask": attention_mask, **said}), None


class Foreign(Halves):
    """A causal language model of Transformers with paged attention."""

    def __init__(self, halves: tuple[Any, Any, Stub], host: Host, b: Build, vocab: int) -> None:
        super().__init__(*halves)
        self.host = host
        hidden = int(self.body.config.get_text_config().hidden_size)
        self.spec = self.describe(b, vocab, hidden, tuple(host.kv))

    def forward(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        """tokens [T] -> hidden states [T, hidden]; several sequences lie one behind the other."""
        ctx.kernels.waits += 1  # so that such a step is never recorded
        self.host.ctx = ctx
        made = self.body(input_ids=tokens[None], position_ids=ctx.positions[None], use_cache=False)
        return made[0][0]


def build_foreign(config: dict[str, Any], b: Build) -> Foreign | OwnCaches:
    """Build the model, and prove against Transformers alone what of it we replace: attention, or else nothing but who
    keeps its caches."""
    kind = config.get("model_type")
    try:
        with torch.no_grad(), failing_as("its layers cannot be called one piece after the other"):
            return _build(config, b)
    except ModelError as error:
        raise ModelError(f"Model type '{kind}' cannot be run through Transformers here: {error}.") from error.__cause__


def _build(config: dict[str, Any], b: Build) -> Foreign | OwnCaches:
    model, hf_config, headless = _load(config, b)
    vocab = int(hf_config.get_text_config().vocab_size)
    ids = _test_prompt(hf_config, b)
    with failing_as("its rotation changes with the length of a run"):
        _fix_rotation(model, b)
    expected = _say(model, ids[: sum(PIECES)])
    halves = divide(model)
    made: Foreign | OwnCaches
    try:
        made = _paged(halves, hf_config, b, ids[: sum(PIECES)], expected)
    except ModelError as paged:
        halves[0].set_attn_implementation("eager")
        with whole(halves):
            expected = _say(model, ids)
            if _looks_ahead(model, ids, expected, b):
                raise ModelError("attention looks ahead") from paged.__cause__
        made = OwnCaches(halves)
        try:
            prove_own_caches(made, b, vocab, ids, expected, MORE_PIECES)
        except ModelError as own:
            raise ModelError(f"{paged}, and {own}") from paged.__cause__
        made.spec.extras["not_paged"] = str(paged)
    made.spec.extras["headless"] = headless
    b.book.used.update(b.checkpoint.names())
    return made


def _test_prompt(hf_config: Any, b: Build) -> Tensor:
    """Random tokens, and each special one: some models count positions by these."""
    said = hf_config.get_text_config()
    vocab, count = int(said.vocab_size), max(sum(PIECES), min(sum(MORE_PIECES), b.max_positions))
    ids = torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(0))
    special = [getattr(said, f"{name}_token_id", None) for name in ("pad", "bos", "eos")]
    for at, number in enumerate(special):
        if isinstance(number, int) and 0 <= number < vocab and 5 + 9 * at < count:
            ids[5 + 9 * at] = number
    return ids.to(b.device)


def _say(model: Any, ids: Tensor) -> Tensor:
    """What Transformers alone says to a prompt: its logits."""
    with failing_as("Transformers itself does not compute a plain prompt with it"):
        logits: Tensor = model(input_ids=ids[None], use_cache=False).logits[0].float()
    return logits


def _looks_ahead(model: Any, ids: Tensor, said: Tensor, b: Build) -> bool:
    """Do answers change with what comes later, however little? (In 16 bits experts with other company round otherwise.)
    No cache can serve such a model."""
    half = len(ids) // 2
    other = torch.cat((ids[:half], ids[half:].flip(0)))
    away = (_say(model, other)[:half] - said[:half]).norm()
    return not float(away / said[:half].norm()) <= (1e-3 if b.dtype == torch.float32 else 5e-3)


def _load(config: dict[str, Any], b: Build) -> tuple[Any, Any, bool]:
    """The model, its config, and whether its file has no head."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    if b.group.size > 1 or b.quantization is not None or config.get("quantization_config"):
        raise ModelError("quantised weights and several devices are not built for it")
    if b.adapters is not None:
        raise ModelError("adapters are not built for it")
    disable_progress_bar()
    values = {name: value for name, value in config.items() if name not in ("model_type", "dtype", "torch_dtype")}
    with failing_as("Transformers does not take its config.json"):
        hf_config = AutoConfig.for_model(config["model_type"], **_numbers(values))
    if type(hf_config) not in AutoModelForCausalLM._model_mapping:
        raise ModelError("Transformers has no causal model of this type by itself")
    hf_config.use_cache = False
    tensors = {name: b.checkpoint.tensor(name, None, None) for name in b.checkpoint.names()}
    with torch.random.fork_rng(devices=[]), _silent(), failing_as("Transformers cannot load it"):
        kind: Any = AutoModelForCausalLM._model_mapping[type(hf_config)]
        model, report = kind.from_pretrained(
            None, config=hf_config, state_dict=tensors, dtype=b.dtype, attn_implementation="eager",
            output_loading_info=True,
        )  # fmt: skip
    body, headless = _is_body(config), False
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        found = sorted(str(key) for key in report[what])
        if body and what == "missing_keys":
            headless = bool(found)
            found = [key for key in found if key.startswith(f"{model.base_model_prefix}.")]
        if found:
            raise ModelError(f"{what.replace('_', ' ')} in the checkpoint: {', '.join(found[:4])}")
    return model.to(b.device).eval().requires_grad_(False), hf_config, headless


def _paged(halves: tuple[Any, Any, Stub], hf_config: Any, b: Build, ids: Tensor, expected: Tensor) -> Foreign:
    """The model with our attention, proven."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    body, host = halves[0], Host()
    if "position_ids" not in inspect.signature(body.forward).parameters:
        raise ModelError("it takes no positions")
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    for module in body.modules():
        module.tokenmill_host = host
    body.set_attn_implementation(NAME)
    host.looking = True
    said = hf_config.get_text_config()
    indexed = getattr(said, "index_topk", None)
    with failing_as(
        "its attention chooses keys by an index of its own" if indexed else "it works on masks by itself", not indexed
    ):
        at = torch.arange(len(ids), device=b.device)
        body(input_ids=ids[None], position_ids=at[None], use_cache=False)
    host.looking = False
    if not host.kv:
        raise ModelError("it does not ask Transformers' attention interface")
    _check_windows(said, host)
    made = Foreign(halves, host, b, int(said.vocab_size))
    _prove(made, b, ids, expected)
    return made


def _fix_rotation(model: Any, b: Build) -> None:
    """Fix frequencies that depend on a sequence's length to those of this run's longest sequence. Otherwise stored keys
    would change their meaning, and a row would rotate like the longest row beside it."""
    longest = torch.tensor([[b.max_positions - 1]], device=b.device)
    one, x = torch.ones_like(longest), torch.zeros(1, device=b.device)
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        kinds = rope_type if isinstance(rope_type, dict) else {None: rope_type}
        if not any("dynamic" in str(kind) or kind == "longrope" for kind in kinds.values()):
            continue
        named: list[dict[str, Any]] = [{} if layer is None else {"layer_type": layer} for layer in kinds]
        for layer in named:
            module(x, longest, **layer)
        module.rope_type = dict.fromkeys(kinds, "default") if isinstance(rope_type, dict) else "default"
        for layer in named:
            alone, beside = (module(x, at, **layer) for at in (one, torch.cat((one, longest), dim=1)))
            if not all(torch.equal(own, both[:, :1]) for own, both in zip(alone, beside, strict=True)):
                raise ModelError("its rotation changes with the length of a run")


def _is_body(config: dict[str, Any]) -> bool:
    """Does the file name the class of this type's layers without a head?"""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    named = config.get("architectures")
    return isinstance(named, list) and MODEL_MAPPING_NAMES.get(config.get("model_type", "")) in named


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Suppress Transformers' report of a load: our own message says what is wrong."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _numbers(said: Any) -> Any:
    """The value with objects for infinity replaced by numbers: files cannot contain infinity itself."""
    if isinstance(said, dict):
        return float(said["__float__"]) if "__float__" in said else {name: _numbers(one) for name, one in said.items()}
    return [_numbers(one) for one in said] if isinstance(said, list) else said


def _check_windows(said: Any, host: Host) -> None:
    """Refuse windows that exist only as masks: our attention cannot see these."""
    window = getattr(said, "sliding_window", None) or getattr(said, "window_size", None)
    switched = getattr(said, "use_sliding_window", True) is not False
    kinds = getattr(said, "layer_types", None) or []
    if others := sorted(set(map(str, kinds)) - {"full_attention", "sliding_attention"}):
        raise ModelError(f"it has layers of other kinds ({', '.join(others)})")
    windowed = sum(kv.kind == "window" for kv in host.kv)
    if kinds and len(kinds) == len(host.kv):
        if windowed != sum(kind == "sliding_attention" for kind in kinds):
            raise ModelError("its windows are in masks of its own")
    elif window and switched and not windowed:
        raise ModelError("its windows are in masks of its own")
    if getattr(said, "attention_chunk_size", None):
        raise ModelError("its attention is cut into chunks")


def _prove(made: Foreign, b: Build, ids: Tensor, expected: Tensor) -> None:
    """Check that the prompt in pieces, and as two sequences in one step, gives Transformers' own result."""
    size, spans = 16, len(PIECES)
    total, per = len(ids), math.ceil(len(ids) / size)
    pages = [_pages(kv, 2 * per, size, b) for kv in made.host.kv]
    found, at = [], 0
    for count in PIECES:
        ctx = _context(made.host, b, pages, [(0, at, count)], size, per)
        hidden = made.forward(ids[at : at + count], ctx)
        found.append(made.logits(hidden, ctx).float())
        at += count
    both = _context(made.host, b, pages, [(0, 0, total), (1, 0, total)], size, per)
    together = made.logits(made.forward(torch.cat((ids, ids)), both), both).float()
    for one in (torch.cat(found), together[:total], together[total:]):
        check_equal(f"a prompt of {spans} pieces", one, expected, b)


def _pages(kv: KVSpec, blocks: int, size: int, b: Build) -> KVView:
    shapes = ((blocks, kv.heads, size, dim) for dim in (kv.key_dim, kv.value_dim))
    key, value = (torch.zeros(shape, dtype=b.dtype, device=b.device) for shape in shapes)
    return KVView(key, value)


def _context(
    host: Host, b: Build, pages: list[KVView], rows: list[tuple[int, int, int]], size: int, per: int
) -> ForwardContext:
    """The context of a step from (row, first position, tokens) of each sequence. Row i has its blocks from i * per
    on."""

    def whole(values: list[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=b.device)

    positions = [at + i for _, at, n in rows for i in range(n)]
    owners = [row for row, _, n in rows for _ in range(n)]
    starts = [sum(n for _, _, n in rows[:i]) for i in range(len(rows) + 1)]
    ends = [at + n for _, at, n in rows]
    tables = whole([[row * per + j for j in range(per)] for row, _, _ in rows], torch.int32)
    slots = whole([row * per * size + p for row, p in zip(owners, positions, strict=True)])
    entries = whole([math.ceil(end / size) for end in ends], torch.int32)
    plan = GroupPlan(tables, None, entries, slots, reach=size * per * len(rows))
    return ForwardContext(
        kernels=b.kernels, positions=whole(positions), query_start=whole(starts, torch.int32),
        kv_len=whole(ends, torch.int32), max_query=max(n for _, _, n in rows), kv=pages,
        groups=[plan] * len(dict.fromkeys(host.kv)), rows=StepRows(whole([row for row, _, _ in rows]), whole(owners)),
        spans=[(start, n, end) for start, (_, _, n), end in zip(starts, rows, ends, strict=False)]
        if b.device.type == "cpu" else None, block_size=size,
    )  # fmt: skip
