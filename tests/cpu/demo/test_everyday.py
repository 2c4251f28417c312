"""The everyday generators: every answer is computed again here from the question, or stands in what was told."""

from __future__ import annotations

import random
import re

import own_ways
import phrasing
import pytest
import skill_decline
import skill_everyday
import skill_everyday_zh
import skill_expression
import skill_memory
import skill_memory_zh
import skill_told
import skill_tools
from authored_data import load
from render import Case
from skill_everyday import DAYS, FACTS, LENGTH, MONTHS, in_words
from skill_facts import brief, brief_fact


def _asked(make, count: int, seed: int) -> list[tuple[str, str]]:
    rng = random.Random(seed)
    cases = [make(rng) for _ in range(count)]
    assert all(re.search(c.must, c.messages[-1]["content"]) for c in cases)
    return [(c.messages[0]["content"], c.messages[-1]["content"]) for c in cases]


def test_days_and_months_follow_each_other() -> None:
    seen = set()
    for user, answer in _asked(skill_everyday.calendar, 800, 1):
        found = re.fullmatch(r"(\w+) comes (after|before) (\w+)\.", answer)
        if found:
            row = DAYS if found[3] in DAYS else MONTHS
            shift = 1 if found[2] == "after" else -1
            assert row[(row.index(found[3]) + shift) % len(row)] == found[1]
            assert found[3] in user
            seen.add(found[2])
        found = re.fullmatch(r"(\w+) has (\d+) days\.", answer)
        if found:
            assert LENGTH[MONTHS.index(found[1])] == int(found[2])
            seen.add("length")
        found = re.search(r"(Tomorrow|Yesterday|The day after tomorrow) (?:is|was) (\w+)\.", answer)
        if found:
            here = next(d for d in DAYS if d in user)
            shift = {"Tomorrow": 1, "Yesterday": -1, "The day after tomorrow": 2}[found[1]]
            assert DAYS[(DAYS.index(here) + shift) % 7] == found[2]
            seen.add("shift")
    assert seen == {"after", "before", "length", "shift"}


def test_letters_are_those_of_the_word() -> None:
    for user, answer in _asked(skill_everyday.spelling, 600, 2):
        if found := re.fullmatch(r"The (\w+) letter of (\w+) is (\w)\.", answer):
            at = -1 if found[1] == "last" else skill_everyday.ORDER.index(found[1])
            assert found[2].lower()[at] == found[3]
            assert found[2].lower() in user.lower()
        elif found := re.fullmatch(r"([a-z-]+): (\w+) has (\d+) letters\.", answer):
            assert found[1].replace("-", "") == found[2].lower()
            assert len(found[2]) == int(found[3])
        elif found := re.fullmatch(r"([A-Z]) comes (after|before) ([A-Z])\.", answer):
            assert ord(found[1]) - ord(found[3]) == (1 if found[2] == "after" else -1)
        else:
            assert answer.replace("-", "") in user.lower()


def test_numbers_are_compared_rightly() -> None:
    compared = 0
    for _, answer in _asked(skill_everyday.numbers, 600, 3):
        if found := re.search(r"(\d+) is (\w+) than (\d+)\.$", answer):
            up = found[2] in ("bigger", "larger", "greater", "higher", "more")
            assert (int(found[1]) > int(found[3])) == up, answer
            compared += 1
        elif found := re.search(r"(\d+) is (even|odd)\.$", answer):
            assert (int(found[1]) % 2 == 0) == (found[2] == "even")
        elif found := re.fullmatch(r"(\d+) ([*/]) 2 = (\d+)\.", answer):
            assert int(found[3]) == (int(found[1]) * 2 if found[2] == "*" else int(found[1]) // 2)
        elif found := re.fullmatch(r"(\d+) comes (after|before) (\d+)\.", answer):
            assert int(found[1]) - int(found[3]) == (1 if found[2] == "after" else -1)
    assert compared > 100
    assert [in_words(n) for n in (0, 13, 20, 42, 100)] == ["zero", "thirteen", "twenty", "forty-two", "one hundred"]


def test_yes_and_no_agree_with_the_comparison() -> None:
    for user, answer in _asked(skill_everyday.numbers, 900, 4):
        found = re.search(r"(\d+) is (\w+) than (\d+)(?:, right)?\?$", user)
        if found is None or not answer.startswith(("Yes", "No")):
            continue
        more = found[2] in ("bigger", "larger", "greater", "more")
        assert answer.startswith("Yes") == ((int(found[1]) > int(found[3])) == more)


def test_rows_are_sorted_and_ends_found() -> None:
    for user, answer in _asked(skill_everyday.sorting, 600, 5):
        digits = [int(n) for n in re.findall(r"\d+", user)]
        if digits and re.fullmatch(r"[\d, ]+", answer):
            down = re.search("descending|falling|from (large|high|big)", user)
            assert [int(n) for n in answer.split(", ")] == sorted(digits, reverse=bool(down))
        elif digits:
            best = max(digits) if re.search(r"(larg|bigg|high|great)est", answer) else min(digits)
            assert answer.startswith(f"{best} ")
        elif answer.endswith("comes first."):
            assert answer.split()[0] == min(re.findall(r"[a-z]+", user.split(": ")[1].replace(" or ", " ")))
        else:
            words = answer.split(", ")
            assert words == sorted(words)
            assert all(w in user for w in words)


def test_kinds_and_comparisons_do_not_contradict_each_other() -> None:
    for user, answer in _asked(skill_everyday.kinds, 600, 6):
        found = re.match(r"(Yes|No), (?:an? )?(\w+) is (an? .+)\.", answer)
        if found:
            assert found[2] in skill_everyday.KINDS[found[3]]
            assert (found[1] == "Yes") == (found[3] in user)
    answers: dict[str, set[str]] = {}
    for question, answer in FACTS:
        answers.setdefault(question, set()).add(answer)
    assert all(len(a) == 1 for a in answers.values())


@pytest.mark.parametrize(
    "make", [skill_memory.everyday_memory, skill_memory_zh.everyday_memory_zh, skill_memory.third_persons]
)
def test_what_is_answered_was_told(make) -> None:
    rng = random.Random(7)
    asked = set()
    for _ in range(800):
        case: Case = make(rng)
        answer = case.messages[-1]["content"]
        assert re.search(case.must, answer)
        told = " ".join(m["content"] for m in case.messages if m["role"] == "user")
        value = re.sub(r"\\(.)", r"\1", case.must)
        value = value.replace("your ", "my ")
        assert value.lower() in told.lower() or answer == skill_memory.UNTOLD or value in ("aunt", "uncle"), (
            told,
            answer,
        )
        asked.add(re.sub(r"[A-Z]\w+|\d+", "X", case.messages[-2]["content"]))
    assert len(asked) > 250


def test_what_was_not_told_is_not_known() -> None:
    rng = random.Random(8)
    cases = [skill_memory.everyday_memory(rng) for _ in range(3000)]
    untold = [c for c in cases if c.messages[-1]["content"] == skill_memory.UNTOLD]
    assert 60 < len(untold) < 300


def test_chinese_answers_are_right() -> None:
    days = skill_everyday_zh.DAYS
    for user, answer in _asked(skill_everyday_zh.calendar_zh, 300, 9):
        if found := re.fullmatch(r"(明天|昨天|后天)是(星期.)。", answer):
            here = next(d for d in days if d in user)
            assert days[(days.index(here) + {"明天": 1, "昨天": -1, "后天": 2}[found[1]]) % 7] == found[2]
        elif found := re.fullmatch(r"(\d+)月(后面|前面)是(\d+)月。", answer):
            assert (int(found[1]) - int(found[3])) % 12 == (11 if found[2] == "后面" else 1)
    for _, answer in _asked(skill_everyday_zh.numbers_zh, 400, 10):
        if found := re.fullmatch(r"(\d+)比(\d+)(大|小)。", answer):
            assert (int(found[1]) > int(found[2])) == (found[3] == "大")
        elif found := re.fullmatch(r"(\d+)(后面|前面)是(\d+)。", answer):
            assert int(found[3]) - int(found[1]) == (1 if found[2] == "后面" else -1)
        elif found := re.search(r"(\d+)是(单数|双数)。$", answer):
            assert (int(found[1]) % 2 == 0) == (found[2] == "双数")
    for user, answer in _asked(skill_everyday_zh.kinds_zh, 300, 11):
        if answer.startswith(("是的", "不是")):
            kind = answer.rsplit("是", 1)[1].rstrip("。")
            assert answer.startswith("是的") == (kind in user)


def test_everyday_remarks_keep_the_held_out_ones_out() -> None:
    held = {h for row in load().chat for h in row["held"]}
    rng = random.Random(12)
    for make in (skill_everyday.everyday, skill_everyday_zh.everyday_zh):
        assert not held & {make(rng).messages[0]["content"] for _ in range(4000)}


def test_own_figures_are_asked_in_many_composed_ways() -> None:
    rng = random.Random(13)
    for row in load().chat:
        if "must" not in row:
            continue
        asks = {own_ways.composed_ask(rng, row["intent"]) for _ in range(200)} - {""}
        assert len(asks) > 20, row["intent"]


def test_orders_for_one_word_are_never_the_held_out_ones() -> None:
    rng = random.Random(14)
    texts = [brief(rng, "what is the capital of Cuba?") for _ in range(3000)]
    assert not [t for t in texts if t.startswith(("Reply with a single word:", "Using one word,"))]
    assert len({t.split("what")[0] for t in texts}) > 200
    for _ in range(300):
        case = brief_fact(rng)
        assert re.search(case.must, case.messages[-1]["content"])


def test_words_around_an_expression_hold_no_number_and_no_sign() -> None:
    rng = random.Random(17)
    for _ in range(3000):
        for text in (phrasing.amid(rng, "#"), phrasing.amid_zh(rng, "#")):
            around = text.replace("#", " ", 1)
            assert "#" in text and not re.search(r"[\d+*/×÷=#]", around), text
            assert not set(re.findall("[a-z]+", around.lower())) & set(phrasing.COUNTS.split()), text
            assert not set(around) & set(phrasing.COUNTS_ZH), text


def test_divisions_with_any_verb_say_both_numbers_and_keep_the_held_wordings_out() -> None:
    rng = random.Random(18)
    texts = [skill_expression.any_quotient(rng, 96, 12) for _ in range(2000)]
    assert all(re.search(r"\b96\b", t) and re.search(r"\b12s?\b", t) and "[" not in t for t in texts)
    assert len({t.split(" ")[0] for t in texts}) > 100
    assert not [t for t in texts if t.startswith(("Distribute", "How many 12s are there in"))]


def test_requests_for_made_up_tools_are_filled_and_never_name_an_argument_in_a_held_way() -> None:
    rng = random.Random(19)
    for _ in range(4000):
        tool, text, values = skill_tools.invented_request(rng, False)
        assert not re.search(r"[{}\[\]]", text), text
        for key, item in values.items():
            said = re.sub("[_-]", " ", key)
            assert f" using {said} {item}" not in text and f" whose {said} is {item}" not in text
        assert set(values) == set(tool["parameters"]["properties"])


def test_told_sums_are_right_and_both_numbers_are_told() -> None:
    rng, signs = random.Random(20), set()
    for _ in range(3000):
        case = skill_told.told_sum(rng)
        user, answer = (m["content"] for m in case.messages)
        a, sign, b, result, rest = re.fullmatch(r"(\d+) (.) (\d+) = (\d+)(?: (?:r|余) (\d+))?[.。]", answer).groups()
        a, b, result, rest = int(a), int(b), int(result), int(rest or 0)
        assert sorted(map(int, re.findall(r"\d+", user))) == sorted((a, b)) and "{" not in user, user
        real = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[sign]
        assert result == real and rest == (a % b if sign == "/" else 0) and re.search(case.must, answer)
        signs.add((sign, phrasing.is_chinese(user)))
    assert len(signs) == 8


def test_rows_of_numbers_are_added_step_by_step() -> None:
    rng = random.Random(21)
    for _ in range(1000):
        case = skill_told.series(rng)
        user, answer = (m["content"] for m in case.messages)
        numbers = list(map(int, re.findall(r"\d+", user)))
        assert len(numbers) >= 3 and answer.rstrip(".。").endswith(f" = {sum(numbers)}")
        steps = answer.rstrip(".。").split(" = ")
        assert all(sum(map(int, s.split(" + "))) == sum(numbers) for s in steps)


def test_chinese_numerals() -> None:
    known = {0: "零", 7: "七", 10: "十", 14: "十四", 20: "二十", 35: "三十五", 100: "一百", 105: "一百零五"}
    known |= {110: "一百一十", 119: "一百一十九", 250: "二百五十", 999: "九百九十九"}
    assert {n: skill_expression.numeral(n) for n in known} == known
    assert len({skill_expression.numeral(n) for n in range(1000)}) == 1000


def test_words_of_another_language_say_the_held_questions_never() -> None:
    rng = random.Random(22)
    held = {re.sub(r"\W", "", q.split("[")[0]).lower() for r in skill_decline.declines() for q in r["held"]}
    for lang in skill_decline.FOREIGN:
        texts = [skill_decline.foreign(rng, lang) for _ in range(1000)]
        assert len(set(texts)) > 990
        assert not [t for t in texts if re.sub(r"\W", "", t).lower().startswith(tuple(h for h in held if len(h) > 8))]
