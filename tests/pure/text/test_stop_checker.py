"""Stop strings are found in the same place however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.core.request import SamplingParams, TokenDelta
from tokenmill.engine.interfaces.prompts import make_request
from tokenmill.engine.steps.deliveries import Deliveries
from tokenmill.testing.fake_generator import byte_tokenizer
from tokenmill.text.stop import StopChecker, Stops

letters = st.text("ab\n", max_size=40)
words = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4)


def expected(text: str, stop: list[str], include: bool) -> tuple[str, str | None]:
    """The definition: the stop string that ends first, the longest of those that end together."""
    for end in range(len(text) + 1):
        done = [word for word in stop if text[:end].endswith(word)]
        if done:
            word = max(done, key=len)
            return (text[:end] if include else text[: end - len(word)]), word
    return text, None


@settings(max_examples=300, deadline=None)
@given(text=letters, stop=words, include=st.booleans(), cuts=st.lists(st.integers(0, 40)))
def test_any_cut_gives_what_the_whole_text_gives(text: str, stop: list[str], include: bool, cuts: list[int]) -> None:
    checker = StopChecker(stop, include)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    shown, stopped = "", None
    for left, right in zip(edges, edges[1:] + edges[-1:], strict=True):
        new, stopped = checker.push(text[left:right])
        shown += new
        if stopped is None:
            seen = text[:right]
            possible = [size for word in stop for size in range(1, len(word)) if seen.endswith(word[:size])]
            assert shown == seen[: len(seen) - max(possible, default=0)]
    shown += checker.flush()
    assert (shown, stopped) == expected(text, stop, include)


def test_nothing_comes_after_a_stop() -> None:
    checker = StopChecker(["end"])
    assert checker.push("the e") == ("the ", None)
    assert checker.push("nd is near") == ("", "end")
    assert checker.push("end more") == ("", "end")
    assert checker.flush() == ""


@pytest.mark.parametrize("stop", [[], [""]])
def test_no_stop_strings_hold_nothing_back(stop: list[str]) -> None:
    checker = StopChecker(stop)
    assert checker.push("anything") == ("anything", None)
    assert checker.flush() == ""


def test_work_grows_with_the_text_only() -> None:
    # A checker that rescans what it holds back would need 10^10 steps here.
    checker = StopChecker(["a" * 100_000 + "b"])
    for _ in range(1000):
        checker.push("a" * 300)
    assert len(checker.flush()) == 100_000


def test_many_texts_share_what_is_worked_out_once() -> None:
    """A request may bring 16 strings of 256 characters for 128 outputs of each of a thousand prompts."""
    words = ["ab" * 127 + chr(99 + i) for i in range(16)]
    stops = Stops(words)
    assert sum(falls.itemsize * len(falls) for falls in stops.falls) <= 4 * sum(map(len, words))
    deliveries = Deliveries(byte_tokenizer(), lambda name, index: None)
    params = SamplingParams(n=8, max_tokens=9, temperature=1.0, stop=words)
    for name in "ab":
        deliveries.add(make_request(name, None, [5], params, arrival=0.0), lambda delta: None)
        deliveries.deliver([TokenDelta(name, index, [70]) for index in range(8)])
    made = {
        id(track.stop._stops) for asked in deliveries.asked.values() for track in asked.tracks.values() if track.stop
    }
    assert len(made) == 1
