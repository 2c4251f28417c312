"""Lowering in a helper process. Owns: its budget, and the error messages.

Must not know: what lowering is, how processes are kept.
"""

from __future__ import annotations

from typing import Any

from tokenmill.core.errors import ParameterError
from tokenmill.process.client import Crashed, Helper, Overrun, Oversize, Pool
from tokenmill.structured.limits import PARAM, refuse
from tokenmill.structured.lowering import plain_schema

BUDGET_S = 1.0
"""Seconds of processor time. Waiting does not count: a low-priority process waits a lot on a busy machine."""
HELPER = Helper("tokenmill.structured.worker")


class LoweringProcess:
    """Lowers structures in another process, one at a time."""

    def __init__(self, budget_s: float = BUDGET_S) -> None:
        self.budget_s = budget_s
        self.pool = Pool(most=1, busy=1)

    def lower(self, spec: Any, reasoning: dict[str, Any] | None) -> str:
        """The grammar's text. ParameterError: the structure is wrong, or the budget was not enough. BusyError: neither
        is known, because the process was lost or got no processor time."""
        if isinstance(spec, dict):  # from here on, pydantic models are plain data
            spec = {name: plain_schema(value) for name, value in spec.items()}
        try:
            found = self.pool.ask(HELPER, {"spec": spec, "reasoning": reasoning}, self.budget_s)
        except Overrun:
            refuse(f"it could not be worked out with {self.budget_s:g} s of work. Simplify it.")
        except (Crashed, Oversize):
            refuse("it needs too much memory. Simplify it.")
        if "error" in found:
            raise ParameterError(found["error"], param=found.get("param") or PARAM)
        text: str = found["text"]
        return text

    def close(self) -> None:
        """End the process, if there is one."""
        self.pool.close()
