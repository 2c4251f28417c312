"""The generator: answers are recomputed here, held-out wordings stay out of training, stories are varied."""

from __future__ import annotations

import json
import random
import re

import own_facts
import phrasing
import pytest
import skill_chat
import skill_expression
import skill_extract
import skill_keys
import skill_math
import skill_zh
import suites
from authored_data import free_stories, load, loosened, rows
from corpus import Corpus
from diversity import bits_per_character, distinct_windows
from grammar import expand, parse, tidy
from mixture import Mixture
from render import Case, case_segments
from render import learned as learned_segments
from skill_chat import memory
from skill_decline import DECLINED, declines
from skill_facts import brief_fact, story_chat
from skill_keys import json_keys
from skill_refusals import no_call, unoffered
from skill_tools import (
    ARGS,
    FIXED,
    FIXED_FREE,
    FIXED_HELD,
    decorated,
    invented_request,
    near_misses,
    others,
    renamed,
    request,
    tool_case,
)
from stories import enriched, tell
from suites import language_of, repeated_share
from topics import nouns, topic
from vocabulary import is_held


def test_grammar_expands_nested_choices_and_slots() -> None:
    texts = {expand(parse("{a|b {c|d}} [x]"), random.Random(i), lambda name: name.upper()) for i in range(60)}
    assert texts == {"a X", "b c X", "b d X"}
    assert tidy("a owl sat. it saw a unicorn") == "An owl sat. It saw a unicorn"


@pytest.mark.parametrize("size", [0, 1, 2, 3])
def test_arithmetic_answers_are_right(size: int) -> None:
    rng = random.Random(size)
    for _ in range(300):
        case = skill_math.arithmetic(rng, False, size)
        text = case.messages[-1]["content"] if case.messages else (case.prompt + case.continuation).splitlines()[-1]
        found = re.search(r"(-?\d+) ([+*-]) (\d+) = (-?\d+)", text)
        assert found, text
        a, sign, b, result = found.groups()
        real = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]
        assert real == int(result)
        assert re.search(case.must, text)


def test_carry_steps_of_the_thinking_part_are_right() -> None:
    rng = random.Random(5)
    for _ in range(300):
        a, sign, b, result = skill_math.operands(rng, 3)
        text = skill_math.thought(a, sign, b, result)
        assert str(result) in text
        for left, value in re.findall(r"([\d +-]+) = (-?\d+), write", text):
            total = 0
            for op, number in re.findall(r"([+-]?) ?(\d+)", left):
                total += -int(number) if op == "-" else int(number)
            assert total == int(value), text


def test_json_answers_hold_words_of_the_question() -> None:
    rng = random.Random(2)
    for _ in range(200):
        case = skill_extract.json_record(rng, rng.random() < 0.5)
        value = json.loads(case.messages[-1]["content"])
        question = case.messages[0]["content"]
        assert value == case.expect
        assert all(str(key) in question and str(v) in question for key, v in value.items())


@pytest.mark.parametrize("suite", sorted(suites.SUITES))
def test_every_reference_answer_passes_its_own_check(suite: str) -> None:
    # As many as the evaluation asks, but for long ones.
    count = 25 if suite.startswith("story") else 500
    for held in (False, True):
        for case in suites.items(suite, held, count):
            assert suites.judge(case, case.messages[-1]["content"], True)["ok"]
            if case.must or case.check != "story":
                wrong = "zzz <tool_call>" if case.check in ("no_call", "language") else "zzz"
                assert not suites.judge(case, wrong, False)["ok"]


def test_held_out_wordings_are_not_training_wordings() -> None:
    for row in load().wordings.values():
        assert len(row["train"]) >= 4 and row["held"]
        assert not set(row["held"]) & set(row["train"]), row["intent"]


def _user_texts(case: Case) -> list[str]:
    return [m["content"] for m in case.messages if m["role"] == "user"]


def test_training_never_asks_in_a_held_out_wording() -> None:
    marks = [re.sub(r"\{.*|\[.*", "", h).strip() for row in load().wordings.values() for h in row["held"]]
    marks = [m for m in marks if len(m) > 22]
    rng, mixture = random.Random(8), Mixture(Corpus(), False)
    texts = [t for _ in range(3000) for t in _user_texts(mixture.draw(rng)[1])]
    assert len(marks) > 20
    for mark in marks:
        assert not [t for t in texts if t.startswith(mark)], mark


def test_every_skill_of_the_mixture_ends_with_its_mark_and_is_drawn() -> None:
    rng, mixture = random.Random(4), Mixture(Corpus(), False)
    cases = [make(rng) for _, _, make in mixture.makers for _ in range(30)]
    drawn = [mixture.draw(rng) for _ in range(1500)]
    for case in [*cases, *(case for _, case in drawn)]:
        segments = case_segments(case)
        assert segments[-1][0].endswith("<|endoftext|>")
        assert any(weight >= 1.0 for _, weight in segments)
    # What has few long texts is drawn too rarely to be in every thousand.
    rates = dict(zip((name for name, _, _ in mixture.makers), mixture.rates, strict=True))
    often = {name for name, rate in rates.items() if rate > 0.01 * sum(rates.values())}
    assert all(rate > 0 for rate in rates.values()) and often <= {name for name, _ in drawn} <= set(rates)


def test_stories_hold_their_topic_and_are_varied() -> None:
    rng = random.Random(1)
    stories = [tell(rng) for _ in range(2000)]
    assert all(word in story.text for story in stories for word in story.must)
    texts = [s.text for s in stories]
    assert len(set(texts)) == len(texts)
    # At 20,000 stories the shares are 0.87 and 1.30 bits (goals 0.75 and 1.3); fewer stories share fewer windows.
    assert distinct_windows(texts) >= 0.9
    assert bits_per_character(texts) >= 1.45


def test_plots_and_stories_by_hand() -> None:
    data = load()
    assert len(data.plots) >= 40
    assert len(free_stories()) >= 300
    assert len({row["text"] for row in free_stories()}) == len(free_stories())
    # By hand means without templates: nothing in them is a slot.
    assert not any(mark in row["text"] for row in free_stories() for mark in "{}[]")


def test_synonyms_keep_slots_and_phrases() -> None:
    assert enriched("[H] looked for [obj.the].") == "[H] looked for [obj.the]."
    text = enriched("[H] looked up and saw the old door.")
    assert text.startswith("[H] looked up and {saw|") and "{door|" in text and text.endswith("}.")


def test_articles_follow_the_sound() -> None:
    assert tidy("an red owl and a old fox") == "A red owl and an old fox"


def test_needles_are_in_the_text_at_any_length() -> None:
    for length in (512, 2048, 8192):
        for case in suites.needle_items(length, 5):
            answer = case.messages[-1]["content"].rstrip(".")
            assert answer in case.messages[0]["content"]
            assert len(case.messages[0]["content"]) < length * 5


def _names(case: Case) -> list[str]:
    out = []
    for tool in case.tools or []:
        out += [tool["name"], *tool["parameters"]["properties"]]
    return [part.lower() for name in out for part in re.findall("[a-z]+|[A-Z][a-z]+", name)]


def test_training_tools_hold_no_word_kept_for_the_evaluation() -> None:
    rng = random.Random(6)
    invented, held = set(), set()
    for _ in range(1500):
        tool, _, _ = invented_request(rng, False)
        invented |= set(_names(Case(suite="", tools=[tool])))
        held |= set(_names(Case(suite="", tools=[invented_request(rng, True)[0]])))
    held_words = {w for w in held if is_held(w)} - {key for key, _, _ in ARGS}
    assert len(held_words) > 60 and len(invented) > 1500
    assert not held_words & invented
    for case in [tool_case(rng, False, []) for _ in range(500)] + [
        no_call(rng, False, load().jokes) for _ in range(500)
    ]:
        assert not {"carpet", "polish", "drawer"} & set(_names(case))


def test_calls_copy_the_schema_and_the_request() -> None:
    rng = random.Random(7)
    for held in (False, True):
        for _ in range(300):
            tool, text, arguments = invented_request(rng, held)
            properties = tool["parameters"]["properties"]
            assert list(arguments) == list(properties)
            for key, value in arguments.items():
                assert str(value).lower() in text.lower()
                assert properties[key]["type"] == ("integer" if isinstance(value, int) else "string")


def test_near_misses_are_not_the_tool() -> None:
    rng = random.Random(8)
    for _ in range(100):
        for tool in near_misses(rng, "open", "gate", False, 2):
            words = _names(Case(suite="", tools=[tool]))[:2]
            assert ("open" in words) != ("gate" in words)


def test_names_are_told_before_between_and_after_other_turns() -> None:
    rng = random.Random(9)
    first = set()
    for _ in range(300):
        case = memory(rng, False, turns=3, target="name")
        name = case.messages[-1]["content"].removeprefix("Your name is ").rstrip(".")
        turns = [m["content"] for m in case.messages if m["role"] == "user"]
        first.add(next((i for i, t in enumerate(turns) if name in t), -1))
    assert {0, 1, 2} <= first


def test_no_sentence_comes_twice_in_a_story() -> None:
    rng = random.Random(10)
    for _ in range(300):
        sentences = [x for x in re.split(r"(?<=[.!?]) ", tell(rng).text) if len(x.split()) > 4]
        assert len(sentences) - len(set(sentences)) <= 1


def test_a_slip_of_a_story_is_read_but_not_learned() -> None:
    rng = random.Random(12)
    slips = 0
    for _ in range(400):
        case = story_chat(rng, False)
        text = case.messages[-1]["content"]
        learned = "".join(t for t, weight in case_segments(case) if weight >= 1.0)
        unlearned = [t for t, weight in case_segments(case) if weight == 0.0]
        assert repeated_share(learned.removesuffix("<|im_end|>")) < 0.1
        assert "\x03" not in "".join(t for t, _ in case_segments(case))
        assert bool(unlearned) == ("\x03" in text)
        # Every slip is a sentence that came before it in the story.
        assert all(sentence.strip() in text.split("\x03")[0] or sentence in learned for sentence in unlearned)
        slips += bool(unlearned)
    assert 20 < slips < 150
    assert learned_segments("a.\x03 a.\x04 b.", 1.0) == [("a.", 1.0), (" a.", 0.0), (" b.", 1.0)]


def test_membership_answers_are_right() -> None:
    rng = random.Random(13)
    patterns = [re.escape(form).replace(re.escape("[w]"), "(.+)") for form in skill_extract.MEMBER]
    answers = []
    for _ in range(300):
        case = skill_extract.membership(rng)
        listing = case.messages[0]["content"]
        for user, bot in zip(case.messages[2::2], case.messages[3::2], strict=True):
            asked = next(m.group(1) for m in (re.fullmatch(p, user["content"]) for p in patterns) if m)
            listed = re.sub(r"(Is|Does) [^?]*\?", "", listing)
            assert (bot["content"] == "Yes.") == (asked in listed)
            answers.append(bot["content"])
    assert 0.35 < answers.count("Yes.") / len(answers) < 0.7


def test_loosened_requests_are_never_the_held_out_one() -> None:
    rng = random.Random(14)
    for name, _, _, train in FIXED:
        assert FIXED_HELD[name] not in train and FIXED_FREE[name] not in [*train, FIXED_HELD[name]]
        texts = {loosened(rng, text, FIXED_HELD[name]) for text in train for _ in range(20)}
        plain = {re.sub(r"[^\w\[\] ]", "", t.lower()).strip() for t in texts}
        assert re.sub(r"[^\w\[\] ]", "", FIXED_HELD[name].lower()).strip() not in plain, name
        slots = sorted(re.findall(r"\[\w+\]", train[0]))
        assert all(sorted(re.findall(r"\[\w+\]", t)) == slots for t in texts)


def test_yes_no_answers_are_right() -> None:
    rng = random.Random(11)
    forms = [form for pair in skill_extract.YES_NO.values() for form in pair]
    patterns = [re.escape(f).replace(re.escape("[n]"), r"\S+").replace(re.escape("[v]"), "(.+)") for f in forms]
    answers = []
    for _ in range(600):
        case = skill_extract.yes_no(rng, False)
        for user, bot in zip(case.messages[2::2], case.messages[3::2], strict=True):
            question = re.sub(r"\?.*", "?", user["content"])
            asked = next(m.group(1) for m in (re.fullmatch(p, question) for p in patterns) if m)
            stated = re.sub(r"\b(Does|Is) [^?]*\?", "", case.messages[0]["content"])
            assert re.match("(Yes|No)[.,]", bot["content"])
            assert bot["content"].startswith("Yes") == bool(re.search(rf"(?<!\w){re.escape(asked)}(?!\w)", stated)), (
                case.messages
            )
            answers.append(bot["content"][:2])
    assert 0.3 < answers.count("Ye") / len(answers) < 0.7


def _computed(text: str) -> int:
    """The value of an expression with exact divisions, computed by Python."""
    assert re.fullmatch(r"[-+*/() \d]+", text)
    result = eval(text)
    assert result == int(result)
    return int(result)


def test_every_step_of_an_expression_has_the_same_value() -> None:
    rng = random.Random(20)
    for _ in range(600):
        node = skill_expression.expression(rng)
        steps = skill_expression.worked(node).split(" = ")
        assert len(steps) >= 2 and {_computed(step) for step in steps} == {skill_expression.value(node)}


@pytest.mark.parametrize("chinese", [False, True])
def test_divisions_say_their_remainder(chinese: bool) -> None:
    rng, remainders = random.Random(21), 0
    for _ in range(400):
        case = skill_expression.division(rng, False, chinese, chat=True)
        answer = case.messages[-1]["content"]
        assert re.search(case.must, answer)
        found = re.fullmatch(r"(\d+) / (\d+) = (\d+)(?: (r|余) (\d+))?[.。]", answer)
        if found is None:
            assert answer in (skill_expression.ZERO, skill_expression.ZERO_ZH)
            continue
        a, b, q, mark, rest = found.groups()
        assert divmod(int(a), int(b)) == (int(q), int(rest or 0))
        assert mark in (None, "余" if chinese else "r")
        remainders += rest is not None
    assert 60 < remainders < 250


def test_products_in_parts_are_right() -> None:
    rng = random.Random(22)
    for _ in range(200):
        answer = skill_expression.long_product(rng).messages[-1]["content"].rstrip(".。")
        assert len({_computed(step) for step in answer.split(" = ")}) == 1


def test_a_story_holds_all_words_of_its_topic() -> None:
    rng = random.Random(23)
    for held in (False, True):
        for _ in range(150):
            about = topic(rng, held)
            text = tell(rng, about=about).text
            assert all(word.lower() in text.lower() for word in about.must), (about.phrase, text)
            assert all(word.lower() in about.phrase.lower() for word in about.must)


def test_no_training_topic_holds_a_noun_kept_for_the_evaluation() -> None:
    for role in ("living", "thing", "place", "idea"):
        assert len(nouns()[role, True]) >= 8 and not set(nouns()[role, True]) & set(nouns()[role, False])
    held = {noun for (_, kept), names in nouns().items() if kept for noun in names}
    rng = random.Random(24)
    for _ in range(600):
        about = topic(rng, False)
        assert not {v for k, v in about.cast.items() if k in ("kind", "fk", "thing")} & held


def test_requests_without_tools_are_answered_without_a_call() -> None:
    rng = random.Random(25)
    for held in (False, True):
        for _ in range(300):
            case = unoffered(rng, held)
            answer = case.messages[-1]["content"]
            assert case.tools is None and "<tool_call>" not in answer
            assert re.search(case.must, answer, re.I), case.messages


def test_decorated_tools_ask_for_the_same_arguments() -> None:
    rng = random.Random(26)
    for _ in range(200):
        tool, _, arguments = invented_request(rng, False)
        other = decorated(rng, tool)
        assert other["name"] == tool["name"] and other["parameters"]["required"] == list(arguments)
        assert set(arguments) <= set(other["parameters"]["properties"])


def test_a_renamed_tool_keeps_what_it_does() -> None:
    rng = random.Random(32)
    for _ in range(200):
        tool, _, arguments = request(rng, False, [], rng.choice(["weather", "calc", "fixed"]))
        other, given = renamed(rng, tool, arguments)
        assert other["description"] == tool["description"] and list(given.values()) == list(arguments.values())
        assert list(given) == list(other["parameters"]["properties"])
        beside = others(rng, 3, {other["name"]}, other["description"])
        assert tool["description"] not in [t["description"] for t in beside]


def test_every_call_of_the_training_data_is_offered() -> None:
    rng = random.Random(33)
    for _ in range(600):
        case = tool_case(rng, False, [])
        calls = suites.calls_of("\n".join(m["content"] for m in case.messages if m["role"] == "assistant"))
        assert calls and {c["name"] for c in calls} <= {t["name"] for t in case.tools or []}


def _keys(value: object) -> list[str]:
    if not isinstance(value, dict):
        return []
    return [key for k, v in value.items() for key in (k, *_keys(v))]


def test_keys_are_in_the_instruction_as_they_are_in_the_answer() -> None:
    rng, seen = random.Random(27), set()
    for held in (False, True):
        for _ in range(300):
            case = json_keys(rng, held)
            value = json.loads(case.messages[-1]["content"])
            assert value == case.expect
            assert all(key in case.messages[0]["content"] for key in _keys(value))
            seen |= set(_keys(value))
            wrong = dict.fromkeys([*value, "other"])
            assert not suites.judge(case, json.dumps(wrong), True)["ok"]
    assert any("_" in k for k in seen) and any(k[-1].isdigit() for k in seen) and any(k != k.lower() for k in seen)


def test_requests_for_keys_are_put_together_in_many_ways() -> None:
    rng = random.Random(34)
    for kind in ("list", "schema", "form"):
        made = [skill_keys.composed(rng, kind) for _ in range(500)]
        assert all(text.count("[k]") == 1 and text.count("[s]") == 1 for text in made)
        assert len({text.split("[k]")[0] for text in made}) > 150
        held = skill_keys.KEYS_HELD + skill_keys.SCHEMA_HELD + skill_keys.TEMPLATE_HELD
        assert not [text for text in made if text in held]
    assert not [text for text in (skill_keys.composed(rng, "schema") for _ in range(500)) if "schema" in text.lower()]


def test_chinese_topics_hold_signs_of_no_list() -> None:
    rng = random.Random(35)
    known = set("".join(w for listing in load().words.values() for w in listing))
    nouns_made = [skill_zh.noun_zh(rng, "zhthing", False) for _ in range(400)]
    assert sum(not set(made) <= known for made in nouns_made) > 40
    assert not any(is_held(made) for made in nouns_made if made in load().words["zhthing"])


def test_an_answer_in_one_word_is_one() -> None:
    rng = random.Random(36)
    for _ in range(200):
        case = brief_fact(rng)
        answer = case.messages[-1]["content"]
        assert re.search(case.must, answer) and not answer.endswith(".")
        assert re.search("word|answer|sentence", case.messages[0]["content"], re.I)


def test_declines_are_in_the_language_of_the_request() -> None:
    rng = random.Random(28)
    for row in declines():
        assert not set(row["held"]) & set(row["ask"]) and row["held"]
        for answer in row["answers"]:
            text = expand(parse(answer), rng, lambda name: name)
            assert re.search(DECLINED, text) and language_of(text) == row["lang"], text


def test_the_language_of_an_answer() -> None:
    assert [language_of(t) for t in ("It is 4.", "是四。", "什么是KV？", "12", "Yes 是的 of course, it is")] == [
        "en",
        "zh",
        "zh",
        "none",
        "mixed",
    ]


def test_own_figures_are_computed() -> None:
    texts = "".join(a for row in rows("chat.jsonl") for a in row["answers"])
    assert not re.search(r"\d", texts.replace("Qwen3", "").replace("bfloat16", "")), "figures come from own_facts"
    rng = random.Random(29)
    for _ in range(200):
        case = skill_chat.own_fact(rng, False)
        assert "[" not in case.messages[-1]["content"] and re.search(case.must, case.messages[-1]["content"])
    assert own_facts.FACTS["me.params.all"] == f"{own_facts.COUNT:,}"


def test_composed_questions_are_never_the_held_out_one() -> None:
    rng = random.Random(30)
    for key, (_, asks, _, _) in skill_chat.ATTRIBUTES.items():
        made = {re.sub(r"[^a-z ]", "", skill_chat.asked(rng, key).lower()).strip() for _ in range(300)}
        assert len(made) > 30
        assert re.sub(r"[^a-z ]", "", asks[-1].lower()).strip() not in made


def test_frames_keep_the_request() -> None:
    rng = random.Random(31)
    for _ in range(200):
        assert phrasing.framed(rng, "Save a note: call me", ending=False).endswith("ave a note: call me")
        assert "天气" in phrasing.framed(rng, "北京天气怎么样？")
