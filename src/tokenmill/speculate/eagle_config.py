"""What config.json says about an EAGLE head. Owns: its forms, and which of the target's layers a head reads.

EAGLE's own    the decoder's fields at the top; layers that are read, and flags, also in `eagle_config` (SGLang, NVIDIA)
speculators    the decoder's fields in `transformer_layer_config`, everything else at the top

A layer is named in two ways: in `eagle_config` by its own number, at the top by the number of the layer behind it,
which reads what it gives. Must not know: tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenmill.core.errors import ModelError
from tokenmill.models.config import ModelConfig

FINAL = -1
"""The tap of the final hidden states."""
PADDING = 2048
"""Where words cannot be compared, a drafter's and its model's vocabulary sizes may differ by so many ids: sizes are
rounded up for kernels."""
_NESTED, _DECODER, _READ = "eagle_config", "transformer_layer_config", "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """decoder: the fields of its layers. hidden, wide: the numbers in one of its own states and in one of the target's.
    words: of its own vocabulary. taps: the layers that it reads. norm_first: the residual is taken behind the norm of
    the states. norm_taps: taps are normed "together", "apart", or not (""). onward: it goes on from normed states."""

    decoder: ModelConfig
    layers: int
    hidden: int
    wide: int
    words: int
    taps: tuple[int, ...]
    norm_first: bool = False
    norm_taps: str = ""
    onward: bool = False


def read_head(raw: dict[str, Any], sizes: tuple[int, int, int], *, third: bool, where: str) -> HeadConfig:
    """The config of a folder, for a target of (hidden size, vocabulary, layers)."""
    hidden, vocab, count = sizes
    top = ModelConfig(raw, architecture="LlamaForCausalLM")
    kind = top.get("speculators_model_type", str, "")
    if kind and not (third and kind == "eagle3"):
        raise ModelError(f"{where}: a head of the kind {kind!r}, which is not what was asked for.")
    decoder = ModelConfig(raw[_DECODER], _DECODER, top.architecture) if top.has(_DECODER) else top
    own = decoder.need("hidden_size", int)
    read = top.get("target_hidden_size", int, own) if third else own
    if read != hidden:
        raise ModelError(f"{where}: a head for hidden states of {read} numbers; the model has {hidden}.")
    _check_words(top, decoder, vocab, where)
    layers = decoder.get("num_hidden_layers", int, 1, low=1, high=64)
    if not third:
        return HeadConfig(decoder, layers, own, hidden, vocab, (FINAL,))

    def flag(name: str, *, default: bool = False) -> bool:
        return (top if top.has(name) else top.sub(_NESTED)).get(name, bool, default)

    together, apart = flag("norm_before_fc"), flag("fc_norm")
    if together and apart:
        raise ModelError(f"{where}: 'norm_before_fc' and 'fc_norm' exclude each other.")
    return HeadConfig(
        decoder=decoder,
        layers=layers,
        hidden=own,
        wide=hidden,
        words=top.get("draft_vocab_size", int, vocab),
        taps=_taps(top, count, where) if flag("use_aux_hidden_state", default=True) else (FINAL,),
        norm_first=flag("norm_before_residual", default=decoder is not top),
        norm_taps="together" if together else "apart" if apart else "",
        onward=flag("norm_output"),
    )


def window_of(c: ModelConfig, layer: int) -> int:
    """How many positions a layer of the head sees; 0: all of them."""
    kinds = c.get("layer_types", list, [])
    if kinds:
        if len(kinds) <= layer or kinds[layer] not in ("full_attention", "sliding_attention"):
            raise c.refuse("layer_types", "must name full_attention or sliding_attention for each layer.")
        slides = kinds[layer] == "sliding_attention"
    else:
        slides = c.get("use_sliding_window", bool, False) and c.has("sliding_window")
    return c.need("sliding_window", int) if slides else 0


def _check_words(top: ModelConfig, decoder: ModelConfig, vocab: int, where: str) -> None:
    """Refuse a head whose config says that it is for another vocabulary. (Some say the size of their own one.)"""
    own = top.get("draft_vocab_size", int, vocab, low=1)
    for said in (each.get("vocab_size", int, vocab, low=1) for each in (top, decoder)):
        if abs(said - vocab) > PADDING and said != own:
            raise ModelError(f"{where}: a head for a vocabulary of {said}; the model has {vocab}.")


def _taps(top: ModelConfig, count: int, where: str) -> tuple[int, ...]:
    """The layers whose outputs are read."""
    own = top.sub(_NESTED).get(_READ, list, [])
    behind = top.get(_READ, list, [])
    told = own or behind or [2, count // 2, count - 3]
    before = 0 if own else 1
    if not all(type(one) is int and before <= one < count + before for one in told):
        raise ModelError(f"{where}: the layers {told} that the head reads are not among the model's {count}.")
    return tuple(one - before for one in told)
