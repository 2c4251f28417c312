"""Requests beyond the model, put together: of every kind and language, whole, and never one of the evaluation."""

from __future__ import annotations

import random
import re

import pytest
from authored_data import load
from decline_parts import composed_decline
from held_out import is_declined
from skill_decline import LANGUAGES, decline, declines
from talk_parts import composed_talk, talk_forms

KINDS = [(row["lang"], row["kind"]) for row in declines()]


@pytest.mark.parametrize(("lang", "kind"), KINDS)
def test_a_kind_has_requests_without_end_that_no_held_out_form_holds(lang: str, kind: str) -> None:
    rng = random.Random(1)
    made = {composed_decline(rng, lang, kind) for _ in range(400)}
    assert len(made) > (150 if lang == "en" else 60 if lang == "zh" else 45)
    for text in made:
        assert text and not is_declined(text) and not re.search(r"[\[\]{}|]|  ", text), text
        assert bool(re.search("[\u4e00-\u9fff]", text)) == (lang == "zh") or lang != "zh"


def test_what_is_composed_is_answered_in_its_language() -> None:
    rng = random.Random(2)
    for lang, kind in KINDS:
        for _ in range(20):
            assert LANGUAGES[lang] in decline(rng, False, lang, kind).messages[-1]["content"]
    assert is_declined("Would you pen a sonnet about the moon?") and not is_declined("Write a sonnet on the moon.")


def test_small_talk_is_put_together_for_its_intent() -> None:
    rng, held = random.Random(3), {text.lower() for row in load().chat for text in row["held"]}
    assert talk_forms().keys() <= {row["intent"] for row in load().chat} and len(talk_forms()) > 18
    for intent in talk_forms():
        made = {composed_talk(rng, intent) for _ in range(300)}
        assert len(made) > 25 and not any(re.search(r"[\[\]{}|]", text) for text in made), intent
        assert not {text.lower().rstrip("!.?") for text in made} & {text.rstrip("!.?") for text in held}
        assert all(bool(re.search("[\u4e00-\u9fff]", text)) == intent.endswith("_zh") for text in made), intent
