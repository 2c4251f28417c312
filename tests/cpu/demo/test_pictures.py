"""The pictures of shapes: each answer is looked up again in the scene that is drawn, and held-out wordings stay out."""

from __future__ import annotations

import random
import re

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
