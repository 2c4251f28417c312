"""What the evaluation keeps for itself is in no training text, whatever is put together."""

from __future__ import annotations

import random
import re
from functools import lru_cache

import later_parts
import pytest
import skill_asked
import skill_keys
import skill_notes
import skill_scene_json
import suites
from authored_data import load, rows
from corpus import Corpus
from held_out import Matcher, is_happening, is_remark, is_story_wording, matcher
from mixture import makers
from render import Case

COMMON = {"needle", "colour_zh", "larger", "quotient_of", "quotient_of_zh"}
"""Wordings whose words are everybody's: `How many [b]s are there in [a]?` is one of theirs for two numbers only."""
WHOLE = re.compile(r"\[\w+\]|\{\w\}")


@lru_cache(maxsize=1)
def _is_kept() -> Matcher:
    """Held-out forms with words enough of their own to be told by them: four in English, six signs in Chinese."""
    forms = [text for name, row in load().wordings.items() if name not in COMMON for text in row["held"]]
    forms += [*skill_notes.KEEP_HELD, *skill_notes.WANT_HELD, *skill_scene_json.HELD_FORMS, *skill_scene_json.HELD_FILL]
    forms += [*skill_scene_json.ZH_HELD, *skill_keys.KEYS_HELD, *skill_keys.SCHEMA_HELD, *skill_keys.TEMPLATE_HELD]
    forms += [*skill_asked.HELD_HEADS, *(text for texts in later_parts.LATER_HELD.values() for text in texts)]
    for name in ("remarks.jsonl", "scenes.jsonl"):
        for row in (row for row in rows(name) if row.get("held")):
            forms += [*row.get("says", []), *(a if isinstance(a, str) else a[0] for a in row.get("asks", []))]
    kept = []
    for text in (WHOLE.sub("[x]", form) for form in forms):
        own = re.sub(r"\[x\]|\W|<\w+:|[{}|]", " ", text)
        if len(re.findall("[a-z]+", own, re.I)) + len(re.findall("[\u4e00-\u9fff]", own)) / 1.5 >= 4:
            kept.append(text)
    assert len(kept) > 100
    return matcher(kept)


def _asked(case: Case) -> list[str]:
    return [m["content"] for m in case.messages if m["role"] == "user"]


@pytest.mark.parametrize("name", [name for name, _, _ in makers(Corpus(), False)])
def test_no_request_of_a_skill_is_one_of_the_evaluation(name: str) -> None:
    make = next(make for other, _, make in makers(Corpus(), False) if other == name)
    rng = random.Random(f"held/{name}")
    draws = 10 if name == "needle" else 120 if name.startswith("story") else 200
    for text in {text for _ in range(draws) for text in _asked(make(rng))}:
        for line in {text, *re.split(r"(?<=[.!?。！？])\s*|\n", text)}:
            if len(line) > 180:
                continue  # No wording with slots of some words is so long.
            assert not _is_kept()(line), line


def test_no_item_of_a_suite_is_asked_in_training() -> None:
    wanted = ["json_own", "tool_own", "memory_note", "two_steps", "follow_up", "json_keys", "story_topic", "story_zh"]
    items = {case.messages[-2]["content"] for suite in wanted for case in suites.items(suite, True, 60)}
    skills = {"json_own", "tools_own", "notes", "steps", "keys", "story_chat", "story_zh", "story_asked"}
    rng = random.Random(5)
    asked = {
        _asked(case)[-1]
        for name, _, make in makers(Corpus(), False)
        if name in skills
        for case in (make(rng) for _ in range(400))
        if _asked(case)
    }
    assert len(items) > 300 and len(asked) > 2500 and not items & asked


def test_what_is_held_out_is_known_in_any_spelling_of_its_ends() -> None:
    assert is_happening("i bid 7 for the red Moon!") and is_happening("Tune to 12.5") and not is_happening("Tune it")
    assert is_remark("Which colour is my tent") and not is_remark("Which colour is my lamp?")
    assert is_story_wording("麻烦你讲一个有关小船的小故事") and not is_story_wording("讲一个小船的故事")
    assert is_happening("Anna has sails.") is False and is_happening("Anna from Rome has no sails.")
