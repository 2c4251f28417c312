"""The optional natural corpus. Owns: reading the folder given with --corpus. It is never part of this repository."""

from __future__ import annotations

import glob
import hashlib
import json
import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

COARSE = re.compile(
    r"\b(sex|kill\w*|die[sd]?|dead|fuck|shit|hell|bastard|idiot|suicide|rape|drunk|naked|gun|murder\w*|nigg\w*|stupid|ass|hate)\b",
    re.I,
)
# Queries that other skills answer; every other intent goes to the honest fallback.
HANDLED = frozenset(
    [
        "greeting",
        "goodbye",
        "tell_joke",
        "user_name",
        "what_is_your_name",
        "who_made_you",
        "are_you_a_bot",
        "thank_you",
        "calculator",
        "weather",
        "what_can_i_ask_you",
        "meaning_of_life",
        "yes",
        "no",
        "maybe",
        "repeat",
        "how_old_are_you",
        "where_are_you_from",
        "what_are_your_hobbies",
        "time",
        "definition",
        "translate",
        "spelling",
        "change_user_name",
        "whisper_mode",
        "cancel",
        "next_song",
        "fun_fact",
        "do_you_have_pets",
        "who_do_you_work_for",
        "timezone",
        "date",
        "change_ai_name",
        "change_accent",
        "change_speed",
        "change_volume",
        "change_language",
        "sync_device",
    ]
)
INTENT = {
    "what_is_your_name": "identity",
    "are_you_a_bot": "identity",
    "who_made_you": "maker",
    "thank_you": "thanks",
    "goodbye": "bye",
    "greeting": "feel",
    "what_can_i_ask_you": "ability",
    "how_old_are_you": "age",
    "what_are_your_hobbies": "hobby",
}


@dataclass(frozen=True)
class Corpus:
    """All texts used from the corpus; every list is empty when there is none."""

    stories: list[str] = field(default_factory=list)
    stories_zh: list[str] = field(default_factory=list)
    held_stories: list[str] = field(default_factory=list)
    books: list[str] = field(default_factory=list)
    pairs: list[tuple[str, str]] = field(default_factory=list)
    poems: list[dict] = field(default_factory=list)
    jokes: list[dict] = field(default_factory=list)
    cities: list[str] = field(default_factory=list)
    queries: list[str] = field(default_factory=list)
    intents: list[tuple[str, str]] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)
    manifest: str = ""


def _jsonl(path: str) -> list[dict]:
    with open(path, encoding="utf-8") as handle:
        return [json.loads(line) for line in handle if line.strip()]


def _stories(folder: Path) -> list[str]:
    out = [row["text"] for name in sorted(glob.glob(str(folder / "*.jsonl"))) for row in _jsonl(name)]
    return [t.replace("“", '"').replace("”", '"').replace("’", "'").replace("‘", "'").strip() for t in out]


def _problems(path: Path) -> list[tuple[str, str]]:
    """One-step word problems with the expression that solves them, whole numbers only."""
    if not path.exists():
        return []
    out = []
    for row in json.loads(path.read_text("utf-8")):
        found = re.fullmatch(r"\( (\d+)\.0 ([-+*/]) (\d+)\.0 \)", row["Equation"])
        if found:
            out.append((f"{row['Body'].rstrip('. ')}. {row['Question']}", " ".join(found.groups())))
    return out


@lru_cache(maxsize=2)
def load_corpus(folder: str | None) -> Corpus:
    """The corpus of a folder, or an empty one."""
    if not folder:
        return Corpus()
    root = Path(folder)
    stories = _stories(root / "stories-en")
    lines = [line.split("\t") for line in (root / "tatoeba-en-zh/cmn.tsv").read_text("utf-8").splitlines()]
    clinc = json.loads((root / "intents-clinc/data_full.json").read_text("utf-8"))
    queries = [t for split in ("train", "val") for t, intent in clinc[split] if intent not in HANDLED]
    queries += [t for split in ("oos_train", "oos_val") for t, _ in clinc[split]]
    snips = [r["slots"].get("city") for r in _jsonl(str(root / "intents-snips/GetWeather.train.jsonl"))]
    books = [Path(p).read_text("utf-8") for p in sorted(glob.glob(str(root / "books-en/*.txt"))) if "LICENSE" not in p]
    poems = [
        {"title": p["title"], "author": p["author"], "text": "".join(p["lines"])}
        for p in _jsonl(str(root / "poems-zh/tang-poems.jsonl"))
    ]
    return Corpus(
        stories=[s for i, s in enumerate(stories) if i % 12],
        held_stories=[s for i, s in enumerate(stories) if i % 12 == 0],
        stories_zh=_stories(root / "stories-zh"),
        books=[b.replace("“", '"').replace("”", '"').replace("’", "'") for b in books],
        pairs=[(x[0], x[1]) for x in lines if not COARSE.search(x[0])],
        poems=[p for p in poems if len(p["text"]) < 120 and len(p["text"]) > 20],
        jokes=[
            {"setup": j["setup"], "punchline": j["punchline"]}
            for j in _jsonl(str(root / "jokes/jokes.jsonl"))
            if len(j["punchline"]) < 120
        ],
        cities=[c for c in dict.fromkeys(snips) if c and c.isascii()],
        queries=queries,
        intents=[(t, INTENT[i]) for t, i in clinc["train"] if i in INTENT],
        problems=_problems(root / "math-svamp/SVAMP.json"),
        manifest=hashlib.sha256((root / "MANIFEST.sha256").read_bytes()).hexdigest(),
    )
