"""Self-consistency: several lines of reasoning over one prompt, in one batch; the most frequent result wins."""

from __future__ import annotations

import re
import sys
from collections import Counter

from tokenmill import LLM
from tokenmill.program import Session


def solve(session: Session, question: str, count: int = 8) -> str:
    """The number that most of `count` samples end with."""
    base = session.talk(chat_template_kwargs={"enable_thinking": True}).user(question)
    samples = [t.gen(temperature=0.9, seed=i, max_tokens=120) for i, t in enumerate(base.fork(count))]
    results = [re.findall(r"\d+", text)[-1:] for text in session.join(samples)]
    return Counter(found[0] for found in results if found).most_common(1)[0][0]


if __name__ == "__main__":
    print(solve(Session(LLM(*sys.argv[1:])), "What is 48 plus 27?"))
