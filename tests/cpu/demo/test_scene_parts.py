"""Happenings put together: parts are told and named, an order and its tool share a meaning, no list is left."""

from __future__ import annotations

import itertools
import random
import re

import pytest
from distinct import counts
from scene_parts import _actions, composed_order, composed_scene
from scene_parts_zh import ACTIONS, composed_order_zh, composed_scene_zh
from scenes import Scene, tell
from skill_scene_json import scene_json
from skill_scene_tools import scene_tool

SLOT = re.compile(r"\[(\w+)\]|<(\w+):")


def _used(text: str) -> set[str]:
    return {a or b for a, b in SLOT.findall(text)}


@pytest.mark.parametrize("chinese", [False, True])
def test_a_happening_names_every_part_that_it_tells(chinese: bool) -> None:
    rng = random.Random(1)
    shapes, names = set(), set()
    for _ in range(800):
        scene: Scene = composed_scene_zh(rng) if chinese else composed_scene(rng)
        order, near = composed_order_zh(rng) if chinese else composed_order(rng)
        for made in (scene, order, *near):
            assert all(field.names for field in made.fields.values())
            names |= {name for field in made.fields.values() for name in field.names}
        for made, texts in ((scene, scene.says), (order, order.asks)):
            for text in texts:
                assert _used(text) and _used(text) <= made.fields.keys(), text
                told = tell(rng, made, text, coded=True)
                assert set(told.values) == _used(text) and not re.search(r"[\[\]{}<>|]", told.text), told.text
                shapes.add(text)
    assert len(shapes) > 1300 and len(names) > (50 if chinese else 1000)


def test_an_order_and_its_tool_say_the_same_in_other_words() -> None:
    rng = random.Random(2)
    apart = 0
    for _ in range(500):
        scene, near = composed_order(rng)
        names, does = scene.tool
        groups = [a.verbs for a in _actions() if any(re.search(rf"\b{v}\b", scene.asks[0].lower()) for v in a.verbs)]
        assert any(v in text.lower() for group in groups for v in group for text in does), (scene.asks, does)
        spoken = next(v for group in groups for v in group if re.search(rf"\b{v}\b", scene.asks[0].lower()))
        apart += not any(spoken in name for name in names)
        assert all(other.tool != scene.tool for other in near)
    assert apart > 100
    verbs = [verb for action in _actions() for verb in action.verbs]
    assert len(verbs) == len(set(verbs)) > 150


def test_every_chinese_verb_has_an_english_name_for_its_tool() -> None:
    assert len(ACTIONS) > 35 and all(zh and english and all(v.isascii() for v in english) for zh, english in ACTIONS)


def test_json_and_calls_of_happenings_vary_without_end() -> None:
    rng = random.Random(3)
    for make in (scene_json, scene_tool):
        made = counts([make(rng) for _ in range(1500)])
        assert made["texts"] > 1470 and made["frames"] > 2500, made


def test_the_tools_decide_whether_there_is_a_call() -> None:
    rng = random.Random(4)
    cases = [scene_tool(rng) for _ in range(2000)]
    pairs = [(a, b) for a, b in itertools.pairwise(cases) if a.check == "no_call"]
    assert 100 < len(pairs) < 180
    for refused, called in pairs:
        # The same order comes at once with its tool, and with no other difference.
        assert refused.messages[0] == called.messages[0] and called.check == "tool"
        names = [{tool["name"] for tool in case.tools or []} for case in (refused, called)]
        assert (
            names[0] and names[1] - names[0] >= {called.expect[0]["name"]} and called.expect[0]["name"] not in names[0]
        )
        assert ("工具" in refused.messages[1]["content"]) == bool(
            re.search("[\u4e00-\u9fff]", refused.messages[0]["content"])
        )
