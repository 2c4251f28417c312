"""A whole model folder in milliseconds. Owns: writing a small random Qwen3 or Llama with tokenizer and chat template.

The same arguments give the same bytes. Must not know: engines, or how the files are read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CONTEXT = 2048
SMALLEST_VOCAB = 256 + len(SPECIAL)
_TEXT = (
    "The mill grinds grain into flour, and flour becomes bread.",
    "Words go in at the top; tokens fall out at the bottom, 1234 of them!",
    "It is a windy day: the sails turn 7 times, then 77, then 777.",
    "def grind(grain):\n    return [flour for flour in grain]\n",
)
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny(
    folder: Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 320,
    seed: int = 0,
    architecture: Literal["qwen3", "llama"] = "qwen3",
) -> Path:
    """Write config.json, model.safetensors and tokenizer files into `folder`; -> the folder."""
    if vocab < SMALLEST_VOCAB or hidden % heads or heads % kv_heads:
        raise ValueError(f"vocab must be at least {SMALLEST_VOCAB}; heads must divide hidden, and kv_heads heads")
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(layers, hidden, heads, kv_heads, vocab, architecture)
    tokenizer = _tokenizer(vocab)
    end = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    config["eos_token_id"] = end[0]
    save_file(_tensors(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", {"do_sample": False, "eos_token_id": end})
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": _TEMPLATE}
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **settings})
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def _config(layers: int, hidden: int, heads: int, kv_heads: int, vocab: int, architecture: str) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM" if architecture == "qwen3" else "LlamaForCausalLM"],
        "model_type": architecture,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocab,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": architecture == "qwen3",
        "torch_dtype": "float32",
    }


def _tensors(config: dict[str, object], seed: int) -> dict[str, Tensor]:
    """Random tensors under the names of the architecture; norms lie near one."""
    source = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=source) * (0.15 if len(shape) == 2 else 0.3) + (len(shape) == 1)
        for name, shape in _shapes(config).items()
    }


def _shapes(config: dict[str, object]) -> dict[str, tuple[int, ...]]:
    sizes = {key: value for key, value in config.items() if isinstance(value, int)}
    hidden, inner, head = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    query, key = sizes["num_attention_heads"] * head, sizes["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (sizes["vocab_size"], hidden)}
    for layer in range(sizes["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes[f"{at}.input_layernorm.weight"] = (hidden,)
        shapes[f"{at}.post_attention_layernorm.weight"] = (hidden,)
        shapes[f"{at}.self_attn.q_proj.weight"] = (query, hidden)
        shapes[f"{at}.self_attn.k_proj.weight"] = (key, hidden)
        shapes[f"{at}.self_attn.v_proj.weight"] = (key, hidden)
        shapes[f"{at}.self_attn.o_proj.weight"] = (hidden, query)
        if config["model_type"] == "qwen3":
            shapes[f"{at}.self_attn.q_norm.weight"] = (head,)
            shapes[f"{at}.self_attn.k_norm.weight"] = (head,)
        shapes[f"{at}.mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"{at}.mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{at}.mlp.down_proj.weight"] = (hidden, inner)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (sizes["vocab_size"], hidden)
    return shapes


def _tokenizer(vocab: int) -> Tokenizer:
    """Byte-level BPE; a vocabulary larger than the text can fill leaves ids that no text has."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(_TEXT, trainer)
    inner.add_special_tokens(list(SPECIAL))
    return inner


def _write(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
