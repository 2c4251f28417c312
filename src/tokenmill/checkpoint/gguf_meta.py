"""Checked reading of GGUF metadata. Owns: the known architectures, and refusing values by the name of their key.

Must not know: what a key means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from tokenmill.checkpoint.gguf_file import TensorInfo
from tokenmill.core.errors import ModelError

Tensors = Mapping[str, TensorInfo]
Factors = Callable[[str], "list[float] | None"]
"""Reads the numbers of a small tensor; None: there is no such tensor."""

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "afmoe": "AfmoeForCausalLM",
    "command-r": "CohereForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "ernie4_5-moe": "Ernie4_5_MoeForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma3n": "Gemma3nForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "hunyuan-moe": "HunYuanMoEV1ForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "mimo2": "MiMoV2FlashForCausalLM",
    "minimax-m2": "MiniMaxM2ForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "arcee": "ArceeForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "granite": "GraniteForCausalLM",
    "hunyuan-dense": "HunYuanDenseV1ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "deepseek2": "DeepseekV3ForCausalLM",
    "deepseek32": "DeepseekV32ForCausalLM",
    "glm-dsa": "GlmMoeDsaForCausalLM",
    "falcon-h1": "FalconH1ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "glm4moe": "Glm4MoeForCausalLM",
    "granitehybrid": "GraniteMoeHybridForCausalLM",
    "jamba": "JambaForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2moe": "Lfm2MoeForCausalLM",
    "mamba": "MambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "nemotron_h_moe": "NemotronHForCausalLM",
    "qwen3next": "Qwen3NextForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen2vl": "Qwen2ForCausalLM",
    "qwen3vl": "Qwen3ForCausalLM",
    "qwen3vlmoe": "Qwen3MoeForCausalLM",
    "apertus": "ApertusForCausalLM",
    "bitnet": "BitNetForCausalLM",
    "bloom": "BloomForCausalLM",
    "dbrx": "DbrxForCausalLM",
    "exaone": "LlamaForCausalLM",
    "exaone-moe": "ExaoneMoeForCausalLM",
    "falcon": "FalconForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gptneox": "GPTNeoXForCausalLM",
    "jais2": "Jais2ForCausalLM",
    "minicpm3": "MiniCPM3ForCausalLM",
    "mistral3": "Ministral3ForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "mpt": "MptForCausalLM",
    "olmo": "OlmoForCausalLM",
    "phi2": "PhiForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder": "GPTBigCodeForCausalLM",
}
REFUSED = {
    "gptj": "no reader of the format has it, so that nothing says how its rows lie; the model's own files are read",
    **dict.fromkeys(("bitnet-25", "bitnet-b1.58"), "another program's name, whose weights may be rounded or not; the "
                    "model's own files, and GGUF files of the architecture 'bitnet', are read"),
}  # fmt: skip
"""Architectures that are built here but whose GGUF files are not read, and why."""
MAX_LAYERS = 10_000
_SCALING = ("type", "factor", "original_context_length", "finetuned", "attn_factor")
MAX_EXPERTS = 4096


class Noted(dict[str, Any]):
    """Metadata that notes which keys were asked for."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        super().__init__(metadata)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, or the default."""
        self.asked.add(key)
        return super().get(key, default)


class Meta:
    """Checked reading of one architecture's keys."""

    def __init__(self, metadata: Mapping[str, Any], path: str) -> None:
        self.metadata, self.path = Noted(metadata), path
        self.arch = metadata.get("general.architecture")
        if not isinstance(self.arch, str) or self.arch not in ARCHITECTURES:
            if (why := REFUSED.get(str(self.arch))) is not None:
                raise self.fail(f"architecture {self.arch!r} is not supported: {why}")
            known = ", ".join(sorted(ARCHITECTURES))
            raise self.fail(f"architecture {str(self.arch)[:80]!r} is not supported; known: {known}")

    def fail(self, what: str) -> ModelError:
        """The error that names the file."""
        return ModelError(f"{self.path}: {what}.")

    def value(self, name: str) -> Any:
        """The value of `architecture.name`, or None. A list of equal values (one per layer) counts as one value."""
        found = self.metadata.get(f"{self.arch}.{name}")
        if isinstance(found, list) and found:
            if any(item != found[0] for item in found):
                raise self.fail(f"{self.arch}.{name} differs from layer to layer, which is not supported")
            return found[0]
        return found

    def whole(self, name: str, default: int | None = None, *, most: int = 1 << 26, least: int = 1) -> int:
        """A whole number. Without a default the key is required."""
        found = self.value(name)
        found = default if found is None else found
        if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= most:
            raise self.fail(f"{self.arch}.{name} must be a whole number from {least} to {most}, not {shown(found)}")
        return found

    def each(self, name: str, count: int) -> list[int]:
        """A whole number for each layer. The file may state it once for all."""
        found = self.metadata.get(f"{self.arch}.{name}")
        listed = found if isinstance(found, list) else [found] * count
        fine = all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one <= 1 << 26 for one in listed)
        if len(listed) != count or not fine:
            raise self.fail(f"{self.arch}.{name} must be a whole number, or one for each of {count} layers")
        return [one for one in listed if isinstance(one, int)]

    def share(self, head: int) -> float:
        """How much of each head rotates, as config.json says it: all, if the file is silent."""
        rotated = self.whole("rope.dimension_count", head, most=head)
        return 1.0 if rotated == head else (rotated + 1e-6) / head

    def windows(self, layers: int, period: int | None = None) -> list[bool]:
        """Which layers have a window: a list says it, or a number, the period of those that have none. period: the
        family's (None: the file must say it)."""
        name = f"{self.arch}.attention.sliding_window_pattern"
        found = self.metadata.get(name)
        found = period if found is None else found
        if isinstance(found, int) and not isinstance(found, bool) and 0 <= found <= MAX_LAYERS:
            return [not found or index % found < found - 1 for index in range(layers)]
        if not isinstance(found, list) or len(found) < layers:
            raise self.fail(f"{name} must have an entry for each of {layers} layers, or be a period")
        return [bool(one) for one in found[:layers]]

    def kinds(self, layers: int, period: int | None = None) -> list[str]:
        """The same as config.json has it."""
        return ["sliding_attention" if one else "full_attention" for one in self.windows(layers, period)]

    def scaling(self, *also: str) -> tuple[str, float]:
        """The kind of the rotation's scaling, and its factor. A file that names no kind means linear; by 0 or 1 nothing
        is scaled. also: further keys that the caller reads; others are refused."""
        prefix = f"{self.arch}.rope.scaling."
        known, kind = {*_SCALING, *also}, self.value("rope.scaling.type")
        for key, value in self.metadata.items():
            name = key.removeprefix(prefix)
            # How much of yarn's ramp counts: all of it, and none of it elsewhere.
            idle = (-1, int(kind == "yarn")) if name == "yarn_ext_factor" else (-1, 0, 1, "")
            if name != key and name not in known and value not in idle:
                raise self.fail(f"{key} is not supported")
        if "attn_factor" not in also and self.number("rope.scaling.attn_factor", 1.0) != 1.0:
            raise self.fail(f"{prefix}attn_factor is not supported")
        factor = self.number("rope.scaling.factor", self.number("rope.scale_linear", 1.0)) or 1.0
        kind = "linear" if kind is None else str(kind)
        return ("none" if kind == "linear" and factor == 1.0 else kind), factor

    def stretched(self, divisors: list[float], tensor: str, *also: str) -> list[float]:
        """Stored divisors of frequencies, which a linear factor divides once more; also: as in `scaling`."""
        kind, factor = self.scaling(*also)
        if kind not in ("none", "linear", "longrope"):
            raise self.fail(f"rope scaling {shown(kind)} is not supported beside {tensor}")
        return divisors if kind == "none" else [one * factor for one in divisors]

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        found = self.metadata.get(f"{self.arch}.{name}")
        if found is not None and not isinstance(found, bool):
            raise self.fail(f"{self.arch}.{name} must be true or false, not {shown(found)}")
        return default if found is None else found

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number >= 0. Without a default the key is required."""
        found = self.value(name)
        found = default if found is None else found
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < math.inf:
            raise self.fail(f"{self.arch}.{name} must be a number, not {shown(found)}")
        return float(found)


def shown(value: Any) -> str:
    return "absent" if value is None else repr(value)[:60]
