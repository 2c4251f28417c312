"""Programs over a model in plain Python: text and generations interleaved, many at once in one engine's batch.

`Session(LLM("demo"))` runs in this process, `Session("http://localhost:8000")` against a server (docs/structured.md).
"""

from tokenmill.program.session import Session
from tokenmill.program.talk import Talk

__all__ = ["Session", "Talk"]
