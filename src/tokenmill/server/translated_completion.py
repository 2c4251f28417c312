"""Completions for APIs other than OpenAI's. Owns: opening one for the fields that another API's request stands for.

What comes back has each API's own shape (`answers.py` in its folder). Must not know: any API's shapes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tokenmill.server.bodies import validated
from tokenmill.server.errors import renaming_fields
from tokenmill.server.findings import Names
from tokenmill.server.openai.completions import Completion, Read, open_completion
from tokenmill.server.openai.schemas import CompletionRequest
from tokenmill.server.routing import Work

Fields = Callable[[], dict[str, Any]]
SAME: Names = {}


async def open_translated_completion(
    work: Work, fields: Fields, names: Mapping[str, str] = SAME, read: Callable[[], Awaitable[Read]] | None = None
) -> Completion:
    """A completion for the fields of OpenAI's request that `fields` makes. `names`: the API's names of fields that may
    be wrong. `read`: makes the prompts in another way."""
    context, job = work.context, work.job
    with renaming_fields(names):
        body = await context.bodies.run_in_thread(job.size, lambda: validated(CompletionRequest, fields()))
        work.apply_job_fields(body)
        return await open_completion(context, body, job, work.base(), read)
