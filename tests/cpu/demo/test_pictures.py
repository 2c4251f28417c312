"""The pictures of shapes: each answer is looked up again in the scene that is drawn, and held-out wordings stay out."""

from __future__ import annotations

import random
import re

from vision_phrases import FORMS, HELD, asked
from vision_scenes import COLOURS, HELD_WHERE, MANY, PLACES, SHAPES, question, scene, talk


def test_a_place_is_that_of_the_one_object_that_the_question_names() -> None:
    rng = random.Random(1)
    asked = set()
    for _ in range(4000):
        objects = scene(rng, MANY)
        kind, text, answer, must = question(rng, objects, "where", chinese=0, more=rng.random() < 0.7)
        if kind != "where":
            continue
        named = [o for o in objects if all(w not in text or w in o for w in (*COLOURS, *SHAPES))]
        assert len(named) == 1 and answer == f"It is {named[0][3]}." and must == named[0][3]
        asked.add(
            re.sub(
                rf"\b({'|'.join([*COLOURS, *SHAPES, 'small', 'large', 'object', 'shape', 'one', 'thing'])})\b ?",
                "",
                text,
            )
        )
    assert len(asked) > 12


def test_a_talk_looks_for_each_object_and_never_in_a_held_out_wording() -> None:
    rng = random.Random(2)
    marks = [form.split("[n]")[0].strip() for form in HELD_WHERE]
    places: list[int] = []
    for _ in range(800):
        objects = scene(rng, (3, 4))
        messages = talk(rng, objects)
        text = "\n".join(m["content"] for m in messages)
        assert not [mark for mark in marks if mark in text]
        answers = [m["content"] for m in messages if m["content"].startswith("It is ")]
        places.append(len({p for p in PLACES for answer in answers if answer == f"It is {p}."}))
        describing = [i for i, m in enumerate(messages) if m["content"].startswith("I see")]
        assert describing in ([], [len(messages) - 1])
    assert sum(places) / len(places) > 0.8


def test_held_out_questions_are_the_held_out_wordings() -> None:
    rng = random.Random(3)
    starts = tuple(form.split("[n]")[0] for form in HELD_WHERE)
    found = [question(rng, scene(rng), "where", held=True) for _ in range(200)]
    assert all(text.startswith(starts) for kind, text, _, _ in found if kind == "where")


def test_a_place_a_colour_and_a_shape_are_asked_for_in_composed_words() -> None:
    rng = random.Random(4)
    for chinese in (False, True):
        seen = {
            kind: {asked(rng, kind, "圆形" if chinese else "red star", chinese) for _ in range(600)} for kind in FORMS
        }
        assert len(seen["where"]) > (100 if chinese else 450) and min(map(len, seen.values())) > 60
        for kind, texts in seen.items():
            assert not any(re.search(r"[\[\]{}|]|  ", text) or text.startswith(HELD) for text in texts), kind
            assert not texts & set().union(*(other for name, other in seen.items() if name != kind))
    # The same opening leads to each kind, so that only the word for what is wanted decides.
    shown = {
        kind: [t for t in (asked(rng, kind, "star") for _ in range(600)) if t.startswith("Show me")] for kind in FORMS
    }
    assert all(len(texts) > 8 for texts in shown.values())
