"""Words for copy tasks. Owns: invented words and signs, a wide vocabulary for names, and its held-out part."""

from __future__ import annotations

import json
import random
import re
import zlib
from functools import lru_cache
from pathlib import Path

from authored_data import free_stories, load, rows

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORD = re.compile(r"\b[a-z]{3,11}\b")


def invented(rng: random.Random) -> str:
    """A word that exists nowhere, so that copying cannot be replaced by memory."""
    pick = rng.random()
    if pick < 0.12:
        return "".join(rng.choice(LETTERS) for _ in range(rng.randint(3, 8)))
    if pick < 0.45:
        return crossed(rng)
    return "".join(rng.choice(load().words["syllable"]) for _ in range(rng.randint(2, 3)))


def crossed(rng: random.Random) -> str:
    """The front of one word with the back of another: parts that a tokenizer cuts in any way."""
    words = _by_use()["any", False]
    a, b = rng.choice(words), rng.choice(words)
    made = a[: rng.randint(2, max(2, len(a) - 1))] + b[-rng.randint(2, max(2, len(b) - 1)) :]
    return made if not is_held(made) else a + "o"


def is_held(word: str) -> bool:
    """Whether a word is kept out of every tool and key name that training sees."""
    return word in ALWAYS_HELD or zlib.crc32(word.encode()) % 12 == 0


ALWAYS_HELD = frozenset(("wash", "fold", "weigh", "polish", "carpet", "fence", "kettle", "drawer"))


@lru_cache(maxsize=1)
def _by_use() -> dict[tuple[str, bool], list[str]]:
    data = load()
    text = " ".join(row["text"] for row in free_stories())
    any_word = sorted(set(WORD.findall(text)) - {"weather", "time", "calculator"})
    # Training has more words than the evaluation: those of the plots, pools and answers too, whose slots are left out.
    more = " ".join(str(row) for name in ("plots", "pools", "faq", "jokes") for row in rows(f"{name}.jsonl"))
    wide = sorted({*any_word, *WORD.findall(re.sub(r"\[[^\]]*\]|\\.", " ", more))} - {"weather", "time", "calculator"})
    lists = {
        "verb": data.words["verb"] + sorted(w for w in ALWAYS_HELD if w in ("wash", "fold", "weigh", "polish")),
        "noun": [*data.words["noun"], *(w for w in data.words["thing"] if " " not in w), "carpet", "fence", "kettle"],
        "param": [*data.words["param"], *data.words["noun"]],
        "any": any_word,
    }
    out = {
        (use, held): [w for w in dict.fromkeys(words) if is_held(w) == held and w.isalpha()]
        for use, words in lists.items()
        for held in (False, True)
    }
    out["any", False] = [w for w in wide if not is_held(w)]
    return out


def word(rng: random.Random, use: str, held: bool) -> str:
    """A word for a use (`verb`, `noun`, `param`, `any`) from the training or the held-out part of the vocabulary.

    In training a part of the words is invented, and a part is any word of the free stories.
    """
    pick = rng.random()
    if not held and pick < 0.3:
        return invented(rng)
    if not held and pick < 0.5:
        use = "any"
    return rng.choice(_by_use()[use, held])


@lru_cache(maxsize=2)
def token_words(all_words: bool) -> tuple[str, ...]:
    """The words that are one token behind a space; without `all_words`, those that names may have."""
    path = Path(__file__).parent / "tokenizer" / "tokenizer.json"
    ids = json.loads(path.read_text("utf-8"))["model"]["vocab"]
    words = sorted(t[1:] for t in ids if t[0] == "\u0120" and len(t) > 2 and t[1:].isalpha() and t[1:].isascii())
    return tuple(words if all_words else [w for w in words if not is_held(w.lower())])


def copied(rng: random.Random) -> str:
    """A word that a text may hold anywhere, also one that no tool or key is called by: it is copied as a value.

    Behind a space a usual word is one token, behind a quote it is two or three: `fence`, but `"f` and `ence"`. How each
    is spelled must be learned for each, so every one of them comes.
    """
    pick = rng.random()
    if pick < 0.55:
        return rng.choice(token_words(True))
    return rng.choice(_every()) if pick < 0.8 else invented(rng)


@lru_cache(maxsize=1)
def _every() -> list[str]:
    return [*_by_use()["any", False], *_by_use()["any", True], *_by_use()["noun", True]]


def any_sign(rng: random.Random) -> str:
    """One of the 3,755 common Chinese signs: the first level of GB 2312, whose rows 16 to 55 have 94 places each."""
    at = rng.randrange(3755)
    return bytes((0xB0 + at // 94, 0xA1 + at % 94)).decode("gb2312")


def joined(rng: random.Random, words: list[str]) -> str:
    """Words as one identifier: snake, camel, kebab or dotted."""
    pick = rng.random()
    if pick < 0.7:
        return "_".join(words)
    if pick < 0.88:
        return words[0] + "".join(w.capitalize() for w in words[1:])
    return ("-" if pick < 0.95 else ".").join(words)
