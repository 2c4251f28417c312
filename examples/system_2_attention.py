"""System-2 attention: first rewrite the context to what matters, then answer from the rewritten one alone."""

from __future__ import annotations

import json
import sys

from tokenmill import LLM
from tokenmill.program import Session

FACTS = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "city": {"type": "string"}},
    "required": ["name", "city"],
    "additionalProperties": False,
}


def solve(session: Session, text: str) -> str:
    """Whose country? The opinions and the noise of the text never reach the second question."""
    rewritten = session.talk().user(f"Extract name and city as JSON: {text}").gen("facts", json=FACTS)
    facts = json.loads(rewritten["facts"])
    return session.talk().user(f"Which country has the capital {facts['city']}?").gen()["answer"]


if __name__ == "__main__":
    print(solve(Session(LLM(*sys.argv[1:])), "I think Anna loves Spain. Today is a sunny day. Anna lives in Rome."))
