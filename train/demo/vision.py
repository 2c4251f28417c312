"""The vision-language model. Owns: the Llava training on rendered shapes, and its files."""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from corpus import load_corpus
from mixture import Mixture
from render import case_segments, chat_segments
from shapes import TEXT
from skill_math import mathematics
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SiglipVisionConfig,
)
from vision_scenes import MANY, SIZE, TOKENS, draw, scene, talk

PATCH, IMAGE_ID = 8, 12
SUMS = 0.2
"""Share of the cases of the text batches that are sums beside those of the mixture."""


def normalised(images: torch.Tensor) -> torch.Tensor:
    """Pixels [N, 3, 64, 64] as the image processor makes them, from bytes [N, 64, 64, 3]."""
    return (images.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5


def pixels(images: list[np.ndarray], device: str) -> torch.Tensor:
    """Normalised pixels [N, 3, 64, 64] of images [64, 64, 3]."""
    return normalised(torch.from_numpy(np.stack(images)).to(device))


def build(text: Path | None, positions: int = TEXT.positions) -> LlavaForConditionalGeneration:
    """The Llava model; its text part starts from the distilled Llama when given."""
    s = TEXT
    vision = SiglipVisionConfig(
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=SIZE,
        patch_size=PATCH,
        vision_use_head=False,
    )
    llama = LlamaConfig(
        vocab_size=s.vocab,
        hidden_size=s.dim,
        intermediate_size=s.ffn,
        num_hidden_layers=s.layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads,
        head_dim=s.head_dim,
        rms_norm_eps=1e-6,
        max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": s.theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=llama,
        image_token_index=IMAGE_ID,
        projector_hidden_act="gelu",
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        image_seq_length=TOKENS,
        tie_word_embeddings=True,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = LlavaForConditionalGeneration(config)
    if text is not None:
        source = AutoModelForCausalLM.from_pretrained(text, dtype=torch.float32)
        model.model.language_model.load_state_dict(source.model.state_dict())
    return model


class Cached:
    """Token ids of segments; those of the questions come again and again, so they are kept."""

    def __init__(self, tokenizer_from: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(tokenizer_from / "tokenizer.json"))
        self.known: dict[str, list[int]] = {}

    def ids(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text."""
        if len(self.known) > 50_000:
            self.known.clear()
        new = list({t for t in texts if t not in self.known})
        made = self.tokenizer.encode_batch(new, add_special_tokens=False)
        self.known |= {t: e.ids for t, e in zip(new, made, strict=True)}
        return [self.known[t] for t in texts]


def encode(tokenizer: Cached, many: list[list[tuple[str, float]]], limit: int = 400) -> dict[str, torch.Tensor]:
    """Right-padded batch; labels on answers only."""
    flat = iter(tokenizer.ids([text for segments in many for text, _ in segments]))
    rows = []
    for segments in many:
        ids, labels = [], []
        for _, weight in segments:
            piece = next(flat)
            ids += piece
            labels += piece if weight >= 1.0 else [-100] * len(piece)
        rows.append((ids[:limit], labels[:limit]))
    width = (max(len(i) for i, _ in rows) + 15) // 16 * 16
    arrays = np.zeros((2, len(rows), width), np.int64)
    arrays[1] = -100
    mask = np.zeros((len(rows), width), np.int64)
    for at, (ids, labels) in enumerate(rows):
        arrays[0, at, : len(ids)], arrays[1, at, : len(ids)], mask[at, : len(ids)] = ids, labels, 1
    return {
        "input_ids": torch.from_numpy(arrays[0]),
        "attention_mask": torch.from_numpy(mask),
        "labels": torch.from_numpy(arrays[1]),
    }


def loss_of(model: LlavaForConditionalGeneration, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's own loss, with logits only where there is a label: they are most of its work otherwise."""
    images = {"pixel_values": normalised(batch["images"])} if "images" in batch else {}
    hidden = model.model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], **images
    ).last_hidden_state
    labels = batch["labels"][:, 1:]
    counted = labels != -100
    return F.cross_entropy(model.lm_head(hidden[:, :-1][counted]).float(), labels[counted])


def save(model: LlavaForConditionalGeneration, tokenizer_from: Path, out: Path) -> None:
    """bf16 weights, config, tokenizer and the processor files."""
    from tokenizer_build import copy_files

    model = model.to(torch.bfloat16)
    model.generation_config.eos_token_id = [2, 0]
    model.generation_config.pad_token_id = 0
    model.save_pretrained(out)
    copy_files(tokenizer_from, out)
    # The processor looks for the template in its own file.
    shutil.copy(Path(__file__).parent / "chat_template.jinja", out / "chat_template.jinja")
    image = {
        "image_processor_type": "SiglipImageProcessor",
        "do_resize": True,
        "size": {"height": SIZE, "width": SIZE},
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "do_convert_rgb": True,
    }
    (out / "preprocessor_config.json").write_text(json.dumps(image, indent=1) + "\n")
    processor = {
        "processor_class": "LlavaProcessor",
        "patch_size": PATCH,
        "vision_feature_select_strategy": "full",
        "image_token": "<|image_pad|>",
        "num_additional_image_tokens": 0,
    }
    (out / "processor_config.json").write_text(json.dumps(processor, indent=1) + "\n")


class Batches(torch.utils.data.IterableDataset):
    """Training batches made in background workers: two of images, then one of text alone."""

    def __init__(self, tokenizer_from: Path, corpus: str | None, size: int, seed: int) -> None:
        self.tokenizer_from, self.corpus, self.size, self.seed = tokenizer_from, corpus, size, seed

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        torch.set_num_threads(1)
        rng = random.Random(f"{self.seed}/{info.id if info else 0}")
        tokenizer = Cached(self.tokenizer_from)
        mixture = Mixture(load_corpus(self.corpus), False)
        step = 0
        while True:
            step += 1
            if step % 3 == 0:
                # Sums are what the text part loses first: they are copied from nothing.
                cases = [
                    mathematics(rng) if rng.random() < SUMS else mixture.draw(rng)[1]
                    for _ in range(max(1, self.size // 2))
                ]
                # A chat loses its last mark, a plain text keeps it: attention over an empty row gives NaN.
                # Longer than the questions: the answer of a case with tools is at its end.
                chosen = [case_segments(c)[:-1] if c.messages else case_segments(c) for c in cases]
                yield encode(tokenizer, chosen, 640)
                continue
            scenes = [scene(rng, MANY) for _ in range(self.size)]
            batch = encode(tokenizer, [chat_segments(talk(rng, o), None) for o in scenes])
            yield batch | {"images": torch.from_numpy(np.stack([draw(o, rng) for o in scenes]))}


def fit(
    text: Path | None,
    tokenizer_from: Path,
    out: Path,
    seconds: float,
    corpus: str | None,
    steps: int = 0,
    size: int = 384,
    workers: int = 12,
) -> None:
    """Joint training on rendered images and, every third batch, on text alone."""
    torch.manual_seed(6)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(text).to(device)
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=1e-3, weight_decay=0.02, betas=(0.9, 0.98), fused=device == "cuda"
    )
    loader = torch.utils.data.DataLoader(
        Batches(tokenizer_from, corpus, size, 6),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        pin_memory=device == "cuda",
    )
    batches = iter(loader)
    batch = next(batches)
    start, step, loss = time.time(), 0, None
    while (step < steps) if steps else (time.time() - start < seconds):
        fraction = step / steps if steps else (time.time() - start) / seconds
        for group in optimiser.param_groups:
            group["lr"] = 1.2e-3 * min(1.0, step / 100 + 0.01) * min(1.0, 2 * max(0.01, 1 - fraction))
        with torch.autocast(device, torch.bfloat16):
            loss = loss_of(model, {k: v.to(device, non_blocking=True) for k, v in batch.items()})
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        step += 1
        batch = next(batches)
        if step % 200 == 0 or step == steps:
            value = loss.item()
            print(f"vision step {step} loss {value:.3f} {time.time() - start:.0f} s", flush=True)
            if not math.isfinite(value):
                raise RuntimeError(f"loss is {value} at step {step}")
    save(model, tokenizer_from, out)
    print("vision", step, "steps", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--corpus")
    parser.add_argument("--smoke", action="store_true", help="three small steps, for a check on the CPU")
    args = parser.parse_args()
    fit(args.text, args.tokenizer, args.out, args.seconds, args.corpus, *((3, 4, 0) if args.smoke else ()))


if __name__ == "__main__":
    main()
