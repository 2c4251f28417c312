"""The vision-language model. Owns: rendered shapes, questions about them, the Llava training and its files."""

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
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SiglipVisionConfig,
)

SIZE, PATCH, TOKENS, IMAGE_ID = 64, 8, 64, 12
SHAPES = ["circle", "square", "triangle", "star"]
COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 160, 50),
    "blue": (40, 70, 220),
    "yellow": (240, 215, 40),
    "orange": (245, 140, 30),
    "purple": (140, 50, 170),
    "black": (20, 20, 20),
    "pink": (250, 150, 190),
}
PLACES = {
    "in the middle": (32, 32),
    "at the top left": (15, 15),
    "at the top right": (49, 15),
    "at the bottom left": (15, 49),
    "at the bottom right": (49, 49),
}
SIZES = {"small": 7, "large": 13}
BACKGROUNDS = [(255, 255, 255), (235, 235, 235), (205, 215, 225), (250, 245, 225)]
SHAPE_ZH = {"circle": "圆形", "square": "正方形", "triangle": "三角形", "star": "星形"}
COLOUR_ZH = {
    "red": "红色",
    "green": "绿色",
    "blue": "蓝色",
    "yellow": "黄色",
    "orange": "橙色",
    "purple": "紫色",
    "black": "黑色",
    "pink": "粉色",
}
PLACE_ZH = {
    "in the middle": "中间",
    "at the top left": "左上角",
    "at the top right": "右上角",
    "at the bottom left": "左下角",
    "at the bottom right": "右下角",
}
COUNT = {1: "one", 2: "two", 3: "three", 4: "four"}
COUNT_ZH = {1: "一", 2: "两", 3: "三", 4: "四"}
Object = tuple[str, str, str, str]  # size, colour, shape, place
MARK = "<|vision_start|>" + "<|image_pad|>" * TOKENS + "<|vision_end|>\n"


def mask_of(shape: str, centre: tuple[int, int], radius: int) -> np.ndarray:
    """The pixels [64, 64] of a shape."""
    y, x = np.mgrid[0:SIZE, 0:SIZE]
    dx, dy = x - centre[0], y - centre[1]
    if shape == "circle":
        return dx**2 + dy**2 <= radius**2
    if shape == "square":
        return (abs(dx) <= radius * 0.85) & (abs(dy) <= radius * 0.85)
    if shape == "triangle":
        return (dy <= radius * 0.8) & (dy >= -radius) & (abs(dx) <= (dy + radius) * 0.55)
    angle = np.arctan2(dy, dx) + np.pi / 2
    turn = np.abs((angle / (2 * np.pi / 5) + 0.5) % 1 - 0.5) * 2
    return np.hypot(dx, dy) <= radius * (1.1 - 0.68 * turn)


MASKS: dict[tuple[str, str, str, int, int], np.ndarray] = {}


def draw(objects: list[Object], rng: random.Random) -> np.ndarray:
    """An image [64, 64, 3] of the objects, each shifted by up to two pixels."""
    image = np.empty((SIZE, SIZE, 3), np.uint8)
    image[:] = rng.choice(BACKGROUNDS)
    for size, colour, shape, place in objects:
        sx, sy = rng.randint(-2, 2), rng.randint(-2, 2)
        key = (size, shape, place, sx, sy)
        if key not in MASKS:
            cx, cy = PLACES[place]
            MASKS[key] = mask_of(shape, (cx + sx, cy + sy), SIZES[size])
        shade = rng.randint(-12, 12)
        image[MASKS[key]] = [min(255, max(0, c + shade)) for c in COLOURS[colour]]
    return image


MANY = (1, 2, 2, 3, 3, 4)
"""Objects of a training scene: with one alone, nothing must be told apart."""


def scene(rng: random.Random, sizes: tuple[int, ...] = (1, 1, 2, 2, 3, 4)) -> list[Object]:
    """One to four objects at different places."""
    places = rng.sample(list(PLACES), rng.choice(sizes))
    return [(rng.choice(list(SIZES)), rng.choice(list(COLOURS)), rng.choice(SHAPES), p) for p in places]


def phrase(item: Object, place: bool = True) -> str:
    """`a small red circle at the top left`."""
    size, colour, shape, where = item
    return f"a {size} {colour} {shape}" + (f" {where}" if place else "")


def question(
    rng: random.Random, objects: list[Object], kind: str | None = None, chinese: float = 0.25
) -> tuple[str, str, str, str]:
    """Kind, question (in Chinese in a share of the cases), answer and the word that must occur."""
    kinds = ["count", "yesno", "describe", "colour", "shape", "where"]
    kind = kind or rng.choice(kinds)
    item = rng.choice(objects)
    zh = rng.random() < chinese
    _, colour, shape, place = item
    if kind in ("colour", "shape", "where"):
        same = [o for o in objects if (o[2] == shape if kind != "shape" else o[1] == colour)]
        if len(same) > 1 and kind == "where":
            same = [o for o in objects if o[1:3] == item[1:3]]
            named = f"{colour} {shape}"
        else:
            named = shape
        if len(same) > 1 and kind != "where":
            if zh:
                q = f"{PLACE_ZH[place]}的图形是什么{'颜色' if kind == 'colour' else '形状'}？"
            else:
                q = rng.choice([f"What {kind} is the object {place}?", f"Which {kind} do you see {place}?"])
        elif len(same) > 1:
            return question(rng, objects, "count", chinese)
        elif zh:
            q = {
                "colour": f"{SHAPE_ZH[shape]}是什么颜色？",
                "shape": f"{COLOUR_ZH[colour]}的是什么形状？",
                "where": f"{COLOUR_ZH[colour]}的{SHAPE_ZH[shape]}在哪里？",
            }[kind]
        else:
            q = {
                "colour": rng.choice([f"What colour is the {shape}?", f"Which color does the {shape} have?"]),
                "shape": rng.choice([f"What shape is {colour}?", f"Which shape is the {colour} object?"]),
                "where": rng.choice([f"Where is the {named}?", f"In which place is the {named}?"]),
            }[kind]
        if zh:
            return (
                kind,
                q,
                *{
                    "colour": (f"是{COLOUR_ZH[colour]}。", COLOUR_ZH[colour]),
                    "shape": (f"是{SHAPE_ZH[shape]}。", SHAPE_ZH[shape]),
                    "where": (f"在{PLACE_ZH[place]}。", PLACE_ZH[place]),
                }[kind],
            )
        return (
            kind,
            q,
            *{
                "colour": (f"It is {colour}.", colour),
                "shape": (f"It is a {shape}.", shape),
                "where": (f"It is {place}.", place),
            }[kind],
        )
    if kind == "count":
        n = len(objects)
        if zh:
            return kind, rng.choice(["图里有几个图形？", "有多少个图形？"]), f"有{COUNT_ZH[n]}个图形。", COUNT_ZH[n]
        q = rng.choice(["How many objects are there?", "How many shapes do you see?", "Count the shapes."])
        return kind, q, f"There {'is' if n == 1 else 'are'} {COUNT[n]} object{'' if n == 1 else 's'}.", COUNT[n]
    if kind == "yesno":
        asked = item if rng.random() < 0.5 else ("small", rng.choice(list(COLOURS)), rng.choice(SHAPES), "")
        there = any(o[1:3] == asked[1:3] for o in objects)
        if zh:
            return (
                kind,
                f"图里有{COLOUR_ZH[asked[1]]}的{SHAPE_ZH[asked[2]]}吗？",
                "有。" if there else "没有。",
                "^有" if there else "没有",
            )
        return kind, f"Is there a {asked[1]} {asked[2]}?", "Yes." if there else "No.", "^Yes" if there else "^No"
    order = sorted(objects, key=lambda o: list(PLACES).index(o[3]))
    text = ", ".join(phrase(o) for o in order[:-1]) + (" and " if len(order) > 1 else "") + phrase(order[-1])
    q = rng.choice(["Describe the image.", "What do you see?", "What is in the picture?", "Describe this picture."])
    return "describe", q, f"I see {text}.", f"I see {text}."


CHINESE = 0.45
"""Chinese questions in training: asked less often, they were nearly all of the wrong answers."""


KINDS = ("count", "yesno", "yesno", "describe", *["colour", "where"] * 3, "shape", "shape")
"""Kinds of a training talk: where a shape must be found among others (colour, where), learning takes longest."""


def talk(rng: random.Random, objects: list[Object], turns: int = 4) -> list[dict]:
    """Several questions on one image, as one conversation; a description comes last.

    After a description every other answer can be copied from its text, and nothing is learned from the image.
    """
    kinds = sorted(rng.sample(KINDS, turns), key=lambda kind: kind == "describe")
    messages: list[dict] = []
    for kind in kinds:
        _, q, a, _ = question(rng, objects, kind, CHINESE)
        messages += messages_of(q, a) if not messages else messages_of(q, a, "")
    return messages


def messages_of(q: str, a: str, image: str = MARK) -> list[dict]:
    """The conversation of one image question with its 64 image tokens."""
    return [{"role": "user", "content": image + q}, {"role": "assistant", "content": a}]


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
                cases = [mixture.draw(rng)[1] for _ in range(max(1, self.size // 2))]
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
