"""Putting models to sleep and waking them by hand, on vLLM's paths. Owns: those paths, their queries, and who may use
them.

They are off unless --enable-sleep-mode lets a model sleep; with several models, --models-control must also let clients
switch them. Keys that may only use models may ask whether one sleeps. Must not know: how memory goes and comes back.
"""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from tokenmill.core.errors import ParameterError
from tokenmill.core.sleeping import check_level, check_mode, check_tags
from tokenmill.server.context import Context, Model
from tokenmill.server.errors import HttpError
from tokenmill.server.many_models.entry import Entry, State, UnreadyError
from tokenmill.server.model_lookup import find_entry, refusal
from tokenmill.server.rights import check_may_manage
from tokenmill.server.routing import Api, add_route, get, judge_without_body

SLEEP, WAKE, ASLEEP = "/sleep", "/wake_up", "/is_sleeping"


def add_routes(app: FastAPI, context: Context) -> None:
    """Add the paths of sleep."""
    shared = context.shared

    def asked(request: Request) -> Entry[Model]:
        entry = find_entry(shared, request, None)
        if not entry.spec.sleeps:
            raise HttpError(404, f"{entry.name!r} cannot sleep: --enable-sleep-mode allows it.")
        if len(shared.models.entries) > 1 and not shared.config.models.models_control:
            raise HttpError(404, "Models cannot be put to sleep by hand here: --models-control allows it.")
        return entry

    def managed(request: Request) -> Entry[Model]:
        judge_without_body(context, request)
        entry = asked(request)
        check_may_manage(shared, request)
        return entry

    async def sleep(request: Request) -> Response:
        """Give a model's memory back when its open requests have ended. The answer comes when it sleeps."""
        entry, query = managed(request), request.query_params
        level = check_level(_number(query.get("level", "1")))
        mode = check_mode(query.get("mode", "wait"))
        try:
            await shared.models.sleepers.sleep(entry, level, abort=mode == "abort")
        except UnreadyError as error:
            raise refusal(error) from None
        return Response()

    async def wake_up(request: Request) -> Response:
        """Take a model's memory again: all of it, or the parts in `tags`."""
        entry = managed(request)
        tags = check_tags(request.query_params.getlist("tags"))
        try:
            await shared.models.sleepers.wake(entry, tags)
        except UnreadyError as error:
            raise refusal(error) from None
        return Response()

    async def is_sleeping(request: Request) -> Response:
        """Does the model sleep, or a part of it?"""
        return Response(
            b'{"is_sleeping":true}' if asked(request).state is State.SLEEPING else b'{"is_sleeping":false}',
            media_type="application/json",
        )

    for path, handler in ((SLEEP, sleep), (WAKE, wake_up)):
        add_route(app, ("POST",), path, handler)
    get(app, ASLEEP, is_sleeping)


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ParameterError(f"level must be 1 or 2, got {text[:20]!r}.", param="level") from None


SLEEPING = Api(add_routes, prefixes=(SLEEP, WAKE, ASLEEP))
