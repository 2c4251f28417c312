"""Tensors of a model that also sees or hears. Owns: under which prefixes its text part lies, and which are not of it.

Must not know: configs, families.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tokenmill.core.errors import ModelError

_PREFIXES = (
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("text_model.model.", "model."),
    ("thinker.", ""),
)
"""Prefixes of text parts: stored -> the family's."""
_ELSEWHERE = re.compile(
    r"(model\.|thinker\.)?(talker|token2wav|code2wav|visual|visual_embeddings_table|vision_tower|vision_model|"
    r"vision_encoder|vision_embedder|vision_projection|vision_projector|image_tower|image_newline|vit|video_tower|embed_vision|"
    r"audio_tower|audio_model|audio_embedder|embed_audio|embed_tokens_extend|encoder|multi_modal_projector|mm_projector|projector|connector|"
    r"aligner|merger)(\.|$)"
)
"""Tensors of the other parts."""
_ADAPTED = re.compile(r"\.lora_[AB]\.(vision|speech)\.weight$")
"""What Phi-4 adds to its text part for pictures and sound; it stores the matrices below ".base_layer"."""


def is_apart(name: str) -> bool:
    """Does this name of a tensor or module belong to the other parts?"""
    return _ELSEWHERE.match(name) is not None or _ADAPTED.search(name) is not None


def text_names(stored: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """The family's names -> the stored ones; and the stored names of the other parts."""
    found: dict[str, str] = {}
    apart: list[str] = []
    for name in stored:
        if is_apart(name):
            apart.append(name)
            continue
        prefix = next((pair for pair in _PREFIXES if name.startswith(pair[0])), ("", ""))
        ours = prefix[1] + name.removeprefix(prefix[0]).replace(".base_layer.", ".")
        if ours in found:
            raise ModelError(f"Tensors {found[ours]!r} and {name!r} both are {ours!r} of the text part.")
        found[ours] = name
    return found, apart
