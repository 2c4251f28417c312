"""Small talk put together. Owns: greetings, thanks, moods, praise and questions for feelings, by their intent."""

from __future__ import annotations

import random
from functools import lru_cache

from authored_data import fill, load, rows
from held_out import Matcher, matcher
from phrasing import is_chinese

KIN = ["mother", "son", "daughter", "cat", "boss", "friend", "uncle", "wife", "brother", "team"]


@lru_cache(maxsize=1)
def talk_forms() -> dict[str, list[str]]:
    """The forms of each intent."""
    return {row["intent"]: row["forms"] for row in rows("talk_parts.jsonl")}


@lru_cache(maxsize=1)
def _is_held() -> Matcher:
    return matcher(text for row in load().chat for text in row["held"])


def composed_talk(rng: random.Random, intent: str) -> str:
    """Something said of an intent; empty where it has no forms."""
    forms = talk_forms().get(intent)
    if not forms:
        return ""
    text = fill(rng.choice(forms), rng, {"kin": rng.choice(KIN)})
    while _is_held()(text):
        text = fill(rng.choice(forms), rng, {"kin": rng.choice(KIN)})
    if is_chinese(text):
        return text.rstrip("，") + rng.choice(["。", "！", "", "？" if text[-1] in "吗何样吧忙" else "。"])
    text = text[0].upper() + text[1:] if rng.random() < 0.75 else text
    asks = text.lower().startswith(("how", "what", "which", "are", "do ", "can", "when", "everything"))
    return text + ("" if text[-1] == "!" else rng.choice(["?", "?", ""] if asks else [".", "!", "", "."]))
