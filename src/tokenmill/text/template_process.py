"""Templates that render in another process. Owns: the processes' shares and budgets, and the error messages.
Must not know: messages, how processes are kept.
"""

from __future__ import annotations

import json
from typing import Any

from tokenmill.core.errors import UserError
from tokenmill.process.client import Crashed, Helper, Overrun, Oversize, Pool

MOST_PROCESSES = 8
MOST_BUSY = 4


def template_pool() -> Pool:
    """Processes for any number of templates."""
    return Pool(MOST_PROCESSES, MOST_BUSY)


class TemplateProcesses:
    """One set of templates in a pool's processes."""

    def __init__(self, sources: dict[str, str], *, budget_s: float, max_chars: int, pool: Pool | None = None) -> None:
        setup = json.dumps({"sources": sources, "max_chars": max_chars})
        # Escaped text takes at most twelve bytes a character.
        self._helper = Helper("tokenmill.text.template_worker", setup, 12 * max_chars + (1 << 16))
        self._budget_s = budget_s
        self._pool = pool if pool is not None else template_pool()

    def start(self) -> None:
        """Have one process ready before the first request; raises UserError when a template does not compile."""
        self._told(None)

    def ask(self, request: dict[str, Any]) -> str:
        """The rendered text. UserError: the template failed or took too long. BusyError: its process was lost or got no
        processor time."""
        return str(self._told(request)["text"])

    def close(self) -> None:
        """End the idle processes; a later request starts a fresh one."""
        self._pool.close()

    def _told(self, request: dict[str, Any] | None) -> dict[str, Any]:
        pool, helper, budget_s = self._pool, self._helper, self._budget_s
        try:
            answer = pool.start(helper, budget_s) if request is None else pool.ask(helper, request, budget_s)
        except Overrun:
            raise UserError(
                f"the chat template did not finish within {budget_s:g} s, so it was stopped; use a simpler template"
            ) from None
        except Oversize:
            raise UserError("the chat template's output is over the limit") from None
        except Crashed:
            raise UserError("the chat template breaks its process (memory or recursion); use a simpler one") from None
        except (TypeError, ValueError, RecursionError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"messages, tools and template arguments must be plain JSON values ({error})") from error
        if "error" in answer:
            raise UserError(str(answer["error"]))
        return answer
