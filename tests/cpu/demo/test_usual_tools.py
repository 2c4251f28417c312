"""Usual tools in composed words: what is called was said, names are free ones, nothing is of the evaluation."""

from __future__ import annotations

import random
import re

import pytest
from authored_data import rows
from held_out import is_order
from scenes import said_of, tell
from twins import keep, kept
from usual_parts import usual_order, usual_tools
from vocabulary import is_held


@pytest.mark.parametrize("chinese", [False, True])
def test_an_order_tells_every_value_and_any_words_lead_to_it(chinese: bool) -> None:
    rng = random.Random(1)
    forms = set()
    for _ in range(1500):
        scene, near, _ = usual_order(rng, chinese)
        told = tell(rng, scene, scene.asks[0])
        forms.add(scene.asks[0])
        assert not re.search(r"[\[\]{}<>|]|\bS ", told.text) and told.values, told.text
        assert all(said_of(v) in told.text for v in told.values.values() if isinstance(v, (str, list))), told.text
        assert all(other.tool != scene.tool for other in near) and not is_order(scene.asks[0])
    assert len(forms) > (350 if chinese else 1100)


def test_the_names_of_usual_tools_are_words_of_the_training() -> None:
    table = [tool for tools in usual_tools().values() for tool in tools.values()]
    assert len(table) > 55
    fixed = {row["name"] for row in rows("tools.jsonl")} | {"weather", "calculator"}
    for tool in table:
        assert len(tool.names) > 1 and tool.avoid <= fixed, tool.key
        assert all(
            near in usual_tools()[zh]
            for zh in (False, True)
            if tool in usual_tools()[zh].values()
            for near in tool.near
        )
        words = [
            w for names in (tool.names, *(f.names for f in tool.fields.values())) for n in names for w in n.split(" ")
        ]
        assert not [w for w in words if is_held(w)], tool.key


def test_orders_of_the_evaluation_are_known() -> None:
    assert is_order("Start a 5 minute timer.") and is_order("Pass this on to Anna: I am late")
    assert is_order("red light, please") and not is_order("Count down 5 minutes.")


def test_a_twin_waits_for_its_skill_and_comes_once() -> None:
    from render import Case

    one, two, case = random.Random(1), random.Random(1), Case("any")
    keep(one, "a", case)
    assert kept(two, "a") is None and kept(one, "b") is None
    assert kept(one, "a") is case and kept(one, "a") is None
