"""Names of modules. Owns: finding the stored matrix of an adapter's module, whatever comes before its layer's number.

Adapter files name modules of the class that they were trained with; checkpoints name tensors. Both agree from
"layers.0" on; some omit or add what comes before. Must not know: tensors.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenmill.models.text_names import is_apart

_ROOTS = frozenset(
    {"model", "language_model", "transformer", "decoder", "gpt_neox", "backbone", "text_model", "thinker"}
)
"""What may stand before the layers of a language model."""
_BESIDE = ("", "model.", "thinker.")
"""What may stand before the parts beside it."""
_SAME = {
    "block_sparse_moe": "mlp",
    "w1": "gate_proj",
    "w3": "up_proj",
    "w2": "down_proj",
    "shared_mlp": "shared_experts",
    "linear_gate": "gate_proj",
    "embed_out": "lm_head",
    "word_embeddings": "embed_tokens",
    "attention": "self_attn",
    "dense": "o_proj",
    "forget_gate": "",
}
"""Mixtures, attention and ends: names of checkpoints and of the classes that read them ("": one of them has none)."""


_EXAONE = (
    (".h.", ".layers."), (".wte", ".embed_tokens"), (".attn.attention.out_proj", ".self_attn.o_proj"),
    (".attn.attention.", ".self_attn."), (".mlp.c_fc_0", ".mlp.gate_proj"), (".mlp.c_fc_1", ".mlp.up_proj"),
    (".mlp.c_proj", ".mlp.down_proj"),
)  # fmt: skip
"""EXAONE 3: names of checkpoints, and of the class that reads them. Some of the first mean other things elsewhere."""
_LFM3 = ((".self_attn.gate_proj", ".self_attn.g_proj"),)


def tail(path: str) -> str | None:
    """The part of a name that is the same everywhere; None: it is not part of a language model."""
    parts = path.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
    first = max(at - 1, 0)
    if any(part not in _ROOTS for part in parts[:first]):
        return None
    return ".".join(parts[first:])


def alike(path: str) -> str:
    """A name with one spelling for what is called differently."""
    return ".".join(same for part in path.split(".") if (same := _SAME.get(part, part)))


class Names:
    """Finds stored matrices by an adapter's names."""

    def __init__(self, paths: Iterable[str]) -> None:
        self.exact = set(paths)
        self.tails: dict[str, str | None] = {}
        renamed = _EXAONE if any(path.endswith(".mlp.c_fc_0") for path in self.exact) else _LFM3
        for path in sorted(self.exact):
            of_class = path
            for old, new in renamed:
                of_class = of_class.replace(old, new)
            for key in {tail(path), tail(alike(path)), tail(of_class)} - {None}:
                assert key is not None
                self.tails[key] = None if key in self.tails and self.tails[key] != path else path

    def find(self, module: str) -> str | None:
        """The stored matrix of a module; None: there is no such, or several."""
        if module in self.exact:
            return module
        if is_apart(module):  # of eyes and ears only the root differs
            bare = module.removeprefix("model.").removeprefix("thinker.")
            return next((path for root in _BESIDE if (path := root + bare) in self.exact), None)
        for key in (tail(module), tail(alike(module))):
            if key is not None and self.tails.get(key) is not None:
                return self.tails[key]
        return None

    def numbers(self, prefix: str) -> list[int]:
        """The experts of the mixture `prefix`."""
        stems = [path.rpartition(".")[0].rpartition(".") for path in self.exact if ".experts." in path]
        every = sorted({int(number) for _, _, number in stems if number.isdigit()})
        kinds = ("gate_up_proj", "gate_proj", "down_proj", "w1")
        return [e for e in every if any(self.find(f"{prefix}.{e}.{kind}") is not None for kind in kinds)]
