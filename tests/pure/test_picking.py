"""Which engine takes a request: what engines have told of their caches, what they have to do, sessions, and owners."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys

from tokenmill.engine.running.picking import ANSWER, MAX_REMEMBERED, STAY, EnginePicker, PickRequest
from tokenmill.kvcache.cache_events import prompt_marks

BLOCK = 16
NAMES = itertools.count()


def ask(prompt: list[int], salt: str = "", session: str | None = None, owner: str = "") -> PickRequest:
    return PickRequest(f"r{next(NAMES)}", prompt, salt, session, owner)


def marks(prompt: list[int], salt: str = "") -> bytes:
    return b"".join(prompt_marks(prompt, salt, BLOCK, 1 << 20))


def served(picker: EnginePicker, engines: list[int], prompt: list[int], **more: str) -> int:
    """Choose, and have the request end; its blocks stay in that engine's cache."""
    asked = ask(prompt, **more)
    engine = picker.pick_engine(engines, asked)
    picker.cached(engine, marks(prompt, asked.salt), b"")
    picker.computed(engine, asked.name, len(prompt), len(prompt))
    picker.done(engine, asked.name)
    return engine


def test_a_known_beginning_draws_until_its_engine_has_more_to_do() -> None:
    picker, engines = EnginePicker(BLOCK), [0, 1, 2]
    shared = list(range(32 * BLOCK))
    first = served(picker, engines, [*shared, *[1] * BLOCK])
    assert {served(picker, engines, [*shared, *[i] * BLOCK]) for i in range(8)} == {first}
    long = ask([5] * 160 * BLOCK)
    assert picker.pick_engine(engines, long, only=first) == first
    away = ask(shared)
    other = picker.pick_engine(engines, away)
    assert other != first, "too busy for its prefix to matter"
    picker.done(other, away.name)
    picker.computed(first, long.name, 159 * BLOCK, 160 * BLOCK)
    for engine in engines:  # what they were given before is the same
        picker._load(engine).given = 0
    assert picker.pick_engine(engines, ask([*shared, *[9] * BLOCK])) == first  # that prompt is nearly done
    picker.done(first, long.name)
    picker.forget(first)
    assert picker._load(first).cost == 0


def test_what_was_evicted_draws_nobody() -> None:
    """The middle of a beginning, then all of it; and what was only sent there, and never came, neither."""
    picker, engines = EnginePicker(BLOCK), [0, 1]
    prompt = list(range(20 * BLOCK))
    told = marks(prompt)
    picker.cached(1, told, b"")
    assert served(picker, engines, prompt) == 1
    left = picker._load(1)
    picker.cached(1, b"", told[8 * 5 :])
    picker.pick_engine(engines, again := ask(prompt), only=1)
    assert left.open[again.name].left == len(prompt) - 5 * BLOCK
    picker.done(1, again.name)
    picker.cached(1, b"", told)
    picker.pick_engine(engines, again := ask(prompt), only=1)
    assert left.open[again.name].left == len(prompt)
    picker.done(1, again.name)  # it failed: nothing was published
    assert not left.held and not left.coming and not left.pending and not left.blocks
    assert picker.pick_engine(engines, ask(prompt)) == 0, "it has been given less"


def test_what_is_on_its_way_draws_others_of_its_kind() -> None:
    """A burst with one beginning goes to one engine before that has told of a single block, until the queue is worth
    more than the beginning."""
    picker, engines = EnginePicker(BLOCK), [0, 1, 2, 3]
    shared = list(range(64 * BLOCK))
    chosen = [picker.pick_engine(engines, ask([*shared, *[i] * BLOCK])) for i in range(100)]
    assert set(chosen[:8]) == {0} and len(set(chosen)) == 4
    assert max(map(chosen.count, engines)) <= 27


def test_loads_are_even_whatever_is_asked() -> None:
    picker, engines = EnginePicker(BLOCK), [0, 1, 2, 3]
    rng = random.Random(1)
    tokens, open_requests = dict.fromkeys(engines, 0), dict.fromkeys(engines, 0)
    for _ in range(400):
        prompt = [rng.randrange(1000) for _ in range(rng.randrange(20, 400))]
        engine = picker.pick_engine(engines, ask(prompt))
        tokens[engine] += len(prompt)
        open_requests[engine] += 1
    for counted in (tokens, open_requests):
        even = sum(counted.values()) / 4
        assert all(0.9 * even <= count <= 1.1 * even for count in counted.values())


def test_a_slower_engine_gets_less() -> None:
    """Sixteen requests are open at a time, and one engine takes five times as long for each."""
    picker, given = EnginePicker(BLOCK), [0, 0]
    ends: list[tuple[int, int, str]] = []
    now = 0
    for n in range(400):
        if len(ends) == 16:
            ends.sort(reverse=True)
            now, engine, name = ends.pop()
            picker.done(engine, name)
        asked = ask([n] * 20)
        engine = picker.pick_engine([0, 1], asked)
        picker.computed(engine, asked.name, 20, 20)
        given[engine] += 1
        ends.append((now + (50 if engine == 0 else 10), engine, asked.name))
    assert given[0] < 0.7 * given[1]


def test_one_after_the_other_go_round() -> None:
    """Nobody has anything to do: whoever has been given least is next, so that caches fill alike."""
    picker, engines = EnginePicker(BLOCK), [0, 1, 2, 3]
    chosen = [served(picker, engines, [i] * 8 * BLOCK) for i in range(16)]
    assert [chosen.count(engine) for engine in engines] == [4] * 4


def test_long_answers_count() -> None:
    """What is read at each step for an answer grows with it."""
    picker, engines = EnginePicker(BLOCK), [0, 1]
    for engine in engines:
        picker.pick_engine(engines, ask([engine] * 4), only=engine)
    picker.said(0, f"r{next(NAMES) - 2}", 1000 * BLOCK)
    few, many = picker._load(1).cost, picker._load(0).cost
    assert many == few + 1000
    assert [picker.pick_engine(engines, ask([9] * 4)) for _ in range(10)] == [1] * 10


def test_a_session_stays_while_it_pays() -> None:
    picker, engines = EnginePicker(BLOCK), [0, 1]
    prompt = [7] * 40 * BLOCK
    stays = served(picker, engines, prompt, session="talk", owner="a")
    other = [[8] * 40 * BLOCK, [9] * 40 * BLOCK]  # edited histories: only the session says where they were
    assert served(picker, engines, other[0], session="talk", owner="a") == stays
    picker._load(1 - stays).given = picker._load(stays).given
    queued = ask([1] * (STAY // 2 - 2 * ANSWER - 60))  # it counts as waiting, and as given
    picker.pick_engine(engines, queued, only=stays)
    assert served(picker, engines, other[1], session="talk", owner="a") == stays
    picker.pick_engine(engines, ask([1] * STAY), only=stays)
    assert served(picker, engines, [3] * 40 * BLOCK, session="talk", owner="a") != stays


def test_no_key_makes_the_router_forget_what_it_knows_of_another() -> None:
    picker, engines = EnginePicker(BLOCK), [0, 1]
    prompt = [7] * BLOCK * 12
    stays = served(picker, engines, prompt, salt="a/", session="talk", owner="a")
    for number in range(2 * MAX_REMEMBERED):
        picker.sessions.put("b", (f"talk {number}",), number % 2)
    assert picker.sessions.count == MAX_REMEMBERED
    assert served(picker, engines, prompt, salt="a/", owner="a") == stays
    assert served(picker, engines, [1] * BLOCK, session="talk", owner="a") == stays
    picker.sessions.put("a", [f"mine {number}" for number in range(2 * MAX_REMEMBERED)], 0)
    assert picker.sessions.count == MAX_REMEMBERED and len(picker.sessions.owners["b"]) >= MAX_REMEMBERED // 2 - 1


def test_salts_keep_beginnings_apart() -> None:
    picker, engines = EnginePicker(BLOCK), [0, 1]
    prompt = [7] * BLOCK * 12
    assert served(picker, engines, prompt, salt="a") == 0
    assert served(picker, engines, prompt, salt="b") == 1
    assert served(picker, engines, prompt, salt="a") == 0


def test_engines_without_a_cache_are_chosen_by_what_they_have_to_do() -> None:
    picker, engines = EnginePicker(0), [0, 1]
    assert [picker.pick_engine(engines, ask([7] * 64)) for _ in range(4)] == [0, 1, 0, 1]


def test_marks_are_the_same_in_every_process() -> None:
    script = (
        "from tokenmill.kvcache.cache_events import prompt_marks;"
        "print(prompt_marks([*range(200), 1 << 70], 'salt', 16, 99999))"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said.strip() == repr(prompt_marks([*range(200), 1 << 70], "salt", 16, 99999))
