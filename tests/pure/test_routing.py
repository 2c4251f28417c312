"""Which engine takes a request: beginnings that it has seen, what it has to do, sessions, and owners apart."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys

from tokenmill.engine.routing import ANSWER, MAX_REMEMBERED, STRIDE, Asked, Router, prefix_keys

NAMES = itertools.count()


def ask(prompt: list[int], salt: str = "", session: str | None = None, owner: str = "") -> Asked:
    return Asked(f"r{next(NAMES)}", prompt, salt, session, owner)


def served(router: Router, engines: list[int], prompt: list[int], **more: str) -> int:
    """Choose, and have the request end."""
    asked = ask(prompt, **more)
    engine = router.pick_engine(engines, asked)
    router.computed(engine, asked.name, len(prompt), len(prompt))
    router.done(engine, asked.name)
    return engine


def test_a_known_beginning_draws_until_its_engine_has_more_to_do() -> None:
    router, engines = Router(), [0, 1, 2]
    shared = list(range(8 * STRIDE))
    first = served(router, engines, [*shared, *[1] * STRIDE])
    assert {served(router, engines, [*shared, *[i] * STRIDE]) for i in range(8)} == {first}
    long = ask([5] * 40 * STRIDE)
    assert router.pick_engine(engines, long, only=first) == first
    assert router.pick_engine(engines, ask(shared)) != first  # too busy for its prefix to matter
    router.computed(first, long.name, 39 * STRIDE, 40 * STRIDE)
    assert router.pick_engine(engines, ask([*shared, *[9] * STRIDE])) == first  # that prompt is nearly done
    router.done(first, long.name)
    router.forget(first)
    assert router._load(first).cost == 0


def test_loads_are_even_whatever_is_asked() -> None:
    router, engines = Router(), [0, 1, 2, 3]
    rng = random.Random(1)
    tokens, open_requests = dict.fromkeys(engines, 0), dict.fromkeys(engines, 0)
    for _ in range(400):
        prompt = [rng.randrange(1000) for _ in range(rng.randrange(20, 400))]
        engine = router.pick_engine(engines, ask(prompt))
        tokens[engine] += len(prompt)
        open_requests[engine] += 1
    for counted in (tokens, open_requests):
        assert max(counted.values()) <= 1.1 * min(counted.values())
    assert all(router._load(engine).cost == tokens[engine] + ANSWER * open_requests[engine] for engine in engines)


def test_prefixes_hit_nearly_as_often_as_on_one_engine() -> None:
    """256 prompts that begin alike: of the shared tokens each engine computes them once."""
    router, engines = Router(), [0, 1, 2, 3]
    rng = random.Random(2)
    shared = [rng.randrange(1000) for _ in range(2048)]
    counts = dict.fromkeys(engines, 0)
    for _ in range(256):
        counts[router.pick_engine(engines, ask([*shared, *(rng.randrange(1000) for _ in range(128))]))] += 1
    missed = sum(1 for count in counts.values() if count)
    assert (256 - missed) * 2048 / (256 * 2176) > 255 * 2048 / (256 * 2176) - 0.02
    assert max(counts.values()) <= 1.1 * min(counts.values())


def test_a_session_stays_while_it_pays() -> None:
    router, engines = Router(), [0, 1]
    prompt = [7] * 10 * STRIDE
    stays = served(router, engines, prompt, session="talk", owner="a")
    other = [[8] * 10 * STRIDE, [9] * 10 * STRIDE]  # edited histories: only the session says where they were
    assert served(router, engines, other[0], session="talk", owner="a") == stays
    router.pick_engine(engines, ask([1] * 30 * STRIDE), only=stays)
    assert served(router, engines, other[1], session="talk", owner="a") != stays


def test_no_key_makes_the_router_forget_what_it_knows_of_another() -> None:
    router, engines = Router(), [0, 1]
    prompt = [7] * STRIDE * 3
    stays = served(router, engines, prompt, salt="a/", session="talk", owner="a")
    seen = router._load(stays).seen
    for number in range(2 * MAX_REMEMBERED):
        router.sessions.put("b", (f"talk {number}",), number % 2)
        seen.put("b", (number, -number), stays)
    assert router.sessions.count == seen.count == MAX_REMEMBERED
    assert served(router, engines, prompt, salt="a/", owner="a") == stays
    router.sessions.put("a", [f"mine {number}" for number in range(2 * MAX_REMEMBERED)], 0)
    assert router.sessions.count == MAX_REMEMBERED and len(router.sessions.owners["b"]) >= MAX_REMEMBERED // 2 - 1


def test_hashes_are_the_same_in_every_process() -> None:
    script = "from tokenmill.engine.routing import prefix_keys; print(prefix_keys(list(range(200)), 'salt'))"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said.strip() == repr(prefix_keys(list(range(200)), "salt"))
