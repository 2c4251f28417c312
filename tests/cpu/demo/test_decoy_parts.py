"""Sentences with two values of a kind: what is asked for was told, and its pair asks for something else of it."""

from __future__ import annotations

import json
import random
import re

import pytest
from decoy_parts import decoy_json, decoy_note, forms
from held_out import is_happening, is_remark


def test_every_form_has_questions_and_names_for_its_values() -> None:
    for chinese in (False, True):
        assert len(forms(chinese)) > 15
        for form in forms(chinese):
            slots = {slot for text in form.says for slot in re.findall(r"\[(\w+)\]", text)}
            assert slots <= form.parts.keys() and any(part.asks for part in form.parts.values())
            for part in form.parts.values():
                assert all(part.tell for _ in part.asks)


@pytest.mark.parametrize("chinese", [False, True])
def test_a_remark_is_asked_for_one_value_and_then_for_another(chinese: bool) -> None:
    rng, pairs, seen = random.Random(1), 0, set()
    before = None
    for _ in range(1200):
        case = decoy_note(rng, chinese)
        texts = [m["content"] for m in case.messages]
        assert re.search(case.must, texts[-1], re.I) and not re.search(r"[\[\]{}]", " ".join(texts)), texts
        assert not re.search(r"\b(my|our|I)\b|我", texts[-1]), texts
        told = re.split(r"(?<=[.。])", texts[0])[0]
        assert not is_remark(told) and not is_happening(told)
        pairs += before is not None and told.rstrip("。.")[-8:] == before
        before = told.rstrip("。.")[-8:]
        seen.add(texts[-2])
    assert pairs > 450 and len(seen) > 1000


def test_json_of_such_a_sentence_holds_what_it_tells() -> None:
    rng, chinese = random.Random(2), 0
    for _ in range(800):
        case = decoy_json(rng)
        user, value = case.messages[0]["content"], json.loads(case.messages[1]["content"])
        assert value == case.expect and all(str(v) in user and k in user for k, v in value.items()), user
        assert not re.search(r"\[[a-z]{1,2}\]", user), user
        chinese += bool(re.search("[\u4e00-\u9fff]", user))
    assert 200 < chinese < 400
