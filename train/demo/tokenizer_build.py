"""The tokenizer. Owns: its pattern, special tokens, training and the files that Transformers reads."""

from __future__ import annotations

import argparse
import json
import random
import shutil
from pathlib import Path

from corpus import load_corpus
from mixture import Mixture
from render import case_segments
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 6144
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|\p{Han}|[^\r\n\p{L}\p{N}]?(?:(?!\p{Han})\p{L})+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<tools>",
    "</tools>",
    "<|vision_start|>",
    "<|image_pad|>",
    "<|vision_end|>",
]
SPECIAL += [f"<|reserved_{i}|>" for i in range(32 - len(SPECIAL))]
# Marks that a reader should see in decoded text are ordinary added tokens.
VISIBLE = frozenset(SPECIAL[3:11])


def sample_texts(corpus_dir: str | None, count: int, seed: int) -> list[str]:
    """Training texts of the tokenizer: the mixture without special marks."""
    mixture, rng = Mixture(load_corpus(corpus_dir), False), random.Random(seed)
    out = []
    for _ in range(count):
        text = "".join(t for t, _ in case_segments(mixture.draw(rng)[1]))
        for mark in SPECIAL:
            text = text.replace(mark, "\n")
        out.append(text)
    corpus = load_corpus(corpus_dir)
    out += corpus.stories + corpus.stories_zh + [f"{a}\n{b}" for a, b in corpus.pairs[::2]]
    return out


def train(texts: list[str]) -> Tokenizer:
    """A byte-level BPE of 6,144 entries; the 32 special ids come first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=16,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path, max_length: int = 8192) -> None:
    """tokenizer.json, tokenizer_config.json and the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    data = json.loads(tokenizer.to_str())
    for token in data["added_tokens"]:
        token["special"] = token["content"] not in VISIBLE
    (folder / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False), "utf-8")
    template = (Path(__file__).parent / "chat_template.jinja").read_text("utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", "utf-8")


def copy_files(source: Path, target: Path) -> None:
    """The tokenizer files of one model folder into another."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, target / name)


def main() -> None:
    """Train and write the committed tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "tokenizer")
    parser.add_argument("--samples", type=int, default=60000)
    args = parser.parse_args()
    texts = sample_texts(args.corpus, args.samples, 11)
    tokenizer = train(texts)
    write(tokenizer, args.out)
    joined = texts[:3000]
    ids = tokenizer.encode_batch(joined, add_special_tokens=False)
    print(
        "vocabulary",
        tokenizer.get_vocab_size(),
        "bytes/token",
        round(sum(len(t.encode()) for t in joined) / sum(len(i.ids) for i in ids), 2),
    )


if __name__ == "__main__":
    main()
