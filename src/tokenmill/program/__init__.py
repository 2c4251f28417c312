"""Programs in plain Python that interleave text and generations. Many run at once in one engine's batch.

`Session(LLM("demo"))` runs in this process, `Session("http://localhost:8000")` against a server (docs/structured.md).
"""

from tokenmill.program.session import Session
from tokenmill.program.talk import Talk

__all__ = ["Session", "Talk"]
