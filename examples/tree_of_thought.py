"""Tree of thought: at each level every way to go on is tried in one batch; those the model trusts most are kept."""

from __future__ import annotations

import re
import sys
from itertools import combinations

from tokenmill import LLM
from tokenmill.program import Session, Talk

State = tuple[float, tuple[int, ...]]


def add(session: Session, a: int, b: int) -> Talk:
    """One thought: a sum, held to its form, with how likely the model finds it."""
    return session.talk().user(f"What is {a} plus {b}?").gen(regex=rf"{a} \+ {b} = [0-9]+\.", logprobs=0)


def solve(session: Session, numbers: tuple[int, ...], width: int = 2) -> int:
    """The sum of several numbers, two at a time, along the `width` best paths."""
    states: list[State] = [(0.0, numbers)]
    while len(states[0][1]) > 1:
        tried = [(s, rest, p, add(session, *p)) for s, rest in states for p in set(combinations(rest, 2))]
        session.wait(*(thought for *_, thought in tried))
        after = []
        for score, rest, pair, thought in tried:
            left = list(rest)
            left.remove(pair[0]), left.remove(pair[1])
            total = int(re.findall(r"\d+", thought["answer"])[-1])
            after.append((score + thought["answer_logprob"], (*left, total)))
        states = sorted(after, reverse=True)[:width]
    return states[0][1][0]


if __name__ == "__main__":
    print(solve(Session(LLM(*sys.argv[1:])), (12, 5, 9)))
