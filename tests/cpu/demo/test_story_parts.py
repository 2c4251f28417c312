"""Stories put together: what a topic names comes back, parts are chosen for themselves, nothing stays unfilled."""

from __future__ import annotations

import random
import re

from authored_data import rows
from distinct import counts
from held_out import is_story_wording
from skill_story_zh import made_story_zh
from skill_zh import noun_zh
from stories import cast, slots_of, tell
from story_parts import beats, dressed
from story_parts_zh import LIVING, PLACE, THING, held_nouns, wide_noun
from topics import topic


def test_words_of_a_topic_come_back_in_the_story() -> None:
    rng = random.Random(1)
    often = {0.0: 0, 1.0: 0}
    words = 0
    for _ in range(150):
        about = topic(rng, False)
        for made in often:
            text = tell(rng, about=about, made=made).text.lower()
            assert not re.search(r"[\[\]{}|]", text), text
            assert all(word.lower() in text for word in about.must)
            often[made] += sum(text.count(word.lower()) > 2 for word in about.must)
        words += len(about.must)
    # The first sentence tells all of them; here they go on being used.
    assert often[1.0] > 0.8 * words and often[1.0] > often[0.0]


def test_the_parts_of_a_plot_are_chosen_for_themselves() -> None:
    rng = random.Random(2)
    seen: dict[str, set[str]] = {"deed": set(), "block": set(), "tool": set()}
    orders = set()
    for _ in range(1000):
        who = cast(rng)
        made = dressed(rng, who, slots_of(rng, who), frozenset())
        for key, values in seen.items():
            values.add(made[key])
        orders.add(tuple(pool[0] for pool in beats(rng)))
    assert all(len(values) > 250 for values in seen.values()), {k: len(v) for k, v in seen.items()}
    assert len(orders) > 150


def test_a_chinese_story_holds_its_topic_and_its_parts_vary() -> None:
    rng = random.Random(3)
    cases = [made_story_zh(rng) for _ in range(600)]
    often = words = 0
    for case in cases:
        text = case.messages[-1]["content"] if case.messages else case.continuation
        must = re.findall(r"\(\?=\[\\s\\S\]\*(.+?)\)", case.must)
        assert must and re.search(case.must, text) and not re.search(r"[\[\]{}|]", text), text
        often += sum(text.count(word) > 2 for word in must)
        words += len(must)
    assert often > 0.6 * words
    made = counts(cases)
    assert made["texts"] == 600 and made["sentences"] > 4500 and made["top"] < 8, made


def test_nouns_and_requests_of_the_evaluation_are_not_put_together() -> None:
    rng = random.Random(4)
    for listing in (LIVING, THING, PLACE):
        assert not held_nouns() & {wide_noun(rng, listing) for _ in range(2000)}
        assert {noun_zh(rng, listing, True) for _ in range(50)} <= held_nouns()
    assert is_story_wording("我要听一个关于小船的故事！") and not is_story_wording("我要听小船的故事")
    asked = [case.messages[0]["content"] for case in (made_story_zh(rng) for _ in range(1500)) if case.messages]
    assert not [text for text in asked if is_story_wording(text)] and len(set(asked)) > 0.99 * len(asked)


def test_each_part_has_many_sentences_and_no_two_parts_share_one() -> None:
    for name in ("story_parts.jsonl", "story_parts_zh.jsonl"):
        pools = [row["texts"] for row in rows(name) if "texts" in row]
        every = [text for pool in pools for text in pool]
        assert len(every) == len(set(every)) and all(len(pool) > 3 for pool in pools)
        assert all(text.count("{") == text.count("}") for text in every)


def test_what_had_been_done_is_told_in_its_own_form() -> None:
    rng = random.Random(8)
    past = "was|saw|drew|went|wrote|knew|gave|sang|flew|ran|wore|rode|stole"
    wrong = re.compile(rf"(?<!the )(?<!a )\b(had|has|have)( never| not once)? ({past})\b")
    for _ in range(600):
        text = tell(rng, about=topic(rng, False), made=1.0).text
        assert not wrong.search(text), text
