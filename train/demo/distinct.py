"""Counts of what the generator makes. Owns: distinct outputs of each skill per 10,000 draws. Knows no grammar.

    python train/demo/distinct.py [--draws 10000] [SKILL ...]

`texts` are whole conversations. `sentences` are all sentences in them, `frames` are sentences without their fillers:
digits are 0, and a word that stands in fewer than one of 200 draws is `_`. `top` is the share of the draws that hold
the commonest frame of four words or more in what is learned.
"""

from __future__ import annotations

import argparse
import random
import re
from collections import Counter

from corpus import Corpus
from mixture import makers
from render import Case

PIECE = re.compile(r"[\u4e00-\u9fff]|[^\W\d_]+|\d+|[^\w\s]|_")
END = re.compile(r"(?<=[.!?])\s|(?<=[。！？])|\n")
RARE = 200
"""A word that stands in fewer than one of so many draws is a filler."""


def told(case: Case) -> tuple[str, str]:
    """What is read of a case, and what is learned."""
    if not case.messages:
        return case.prompt, case.continuation
    said = {role: "\n".join(m["content"] for m in case.messages if m["role"] == role) for role in ("user", "assistant")}
    return said["user"], said["assistant"]


def frame(text: str, kept: frozenset[str]) -> str:
    """A sentence without its fillers."""
    return " ".join("0" if p.isdigit() else p if p in kept or not p[0].isalnum() else "_" for p in PIECE.findall(text))


def counts(cases: list[Case]) -> dict[str, float]:
    """Distinct texts, sentences and frames of the cases, and the share of the draws with the commonest frame."""
    pairs = [told(case) for case in cases]
    seen = Counter(piece for read, learned in pairs for piece in set(PIECE.findall(f"{read} {learned}")))
    kept = frozenset(piece for piece, count in seen.items() if count * RARE >= len(cases))
    sentences = {line for pair in pairs for text in pair for line in END.split(text) if line.strip()}
    top = Counter(
        made
        for _, learned in pairs
        for made in {frame(line, kept) for line in END.split(learned)}
        if len(re.findall("[a-z\u4e00-\u9fff]+", made)) > 3
    )
    most = top.most_common(1)[0][1] if top else 0
    return {
        "texts": len(set(pairs)),
        "sentences": len(sentences),
        "frames": len({frame(line, kept) for line in sentences}),
        "top": round(100 * most / len(cases), 1),
    }


def main() -> None:
    """Print a line for each skill."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("skills", nargs="*")
    parser.add_argument("--draws", type=int, default=10_000)
    args = parser.parse_args()
    for name, _, make in makers(Corpus(), False):
        if args.skills and name not in args.skills:
            continue
        rng = random.Random(17)
        row = counts([make(rng) for _ in range(args.draws)])
        print(f"{name:12}" + "".join(f" {key} {value:>8}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
