"""The Responses API over one WebSocket. Owns: its messages, one response after the other, and errors as events.

`response.create` takes the fields of a request. `generate: false` only reads the input, so that the next answer begins
sooner. With `store: false`, the last response can still be continued on the same connection. Must not know: frames.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import msgspec
from fastapi import Request

from tokenmill.core.errors import ParameterError, UserError
from tokenmill.server.bodies import Parcel
from tokenmill.server.context import Context
from tokenmill.server.errors import HttpError, describe_error, error_object, quoted
from tokenmill.server.fields import MOST_LABEL
from tokenmill.server.model_lookup import asked_model
from tokenmill.server.responses.kept_responses import KeptResponse, RecentResponse
from tokenmill.server.responses.runs import clean_up, events, open_run
from tokenmill.server.responses.schemas import ResponsesRequest
from tokenmill.server.routing import Work
from tokenmill.server.websockets.socket import WebSocket

encode = msgspec.json.Encoder().encode
_DATA = b"\ndata: "


class SocketConversation:
    """The conversation of one connection."""

    def __init__(self, context: Context, request: Request) -> None:
        self.context, self.request = context, request
        self.recent: RecentResponse | None = None
        self.number = 0
        self.stream_id: str | None = None
        self.generate = True

    async def __call__(self, socket: WebSocket) -> None:
        """Answer messages until there are no more."""
        try:
            while (parcel := await socket.receive()) is not None:
                self.stream_id, self.generate = None, True
                try:
                    await self._answer(socket, parcel)
                except Exception as error:
                    await self._say(socket, encode(self._error(describe_error(error))))
                finally:
                    parcel.release()
        finally:
            self._remember(None)

    async def _answer(self, socket: WebSocket, parcel: Parcel) -> None:
        message = self._as_request(parcel)
        async with asked_model(self.context.shared, message) as context, Work(context, message) as work:
            body = await work.read(ResponsesRequest, self._envelope)
            if body.background:
                raise ParameterError("background runs begin with POST /v1/responses.", param="background")
            silent = not self.generate
            run = await open_run(context, work.job, body, work.base(), self.recent, silent=silent)
            work.after.append(partial(clean_up, run))
            async for told in events(run):
                for event in told:
                    await self._say(socket, event[event.index(_DATA) + len(_DATA) : -2])
            self._remember(run.kept)

    def _remember(self, kept: KeptResponse | None) -> None:
        """The next message may continue this response. A stored response is found in the store."""
        store = self.context.store
        if self.recent is not None:
            store.drop(self.recent)
        self.recent = None
        if kept is not None and not store.holds(kept):
            recent = RecentResponse(kept.owner, f"recent_{kept.id}", kept.id, kept.messages)
            # it is too large, or there is no room, so it cannot be continued
            with contextlib.suppress(UserError, HttpError):
                store.add(recent)
                self.recent = recent

    def _as_request(self, parcel: Parcel) -> Request:
        """A message as a request of its own, with the headers of the handshake."""
        state = self.request.scope["state"]
        self.number += 1
        own = {**state, "body": parcel, "request_id": f"{state['request_id']}-{self.number}", "warnings": []}
        return Request({**self.request.scope, "state": own, "query_string": b""})

    def _envelope(self, raw: dict[str, Any]) -> None:
        """The fields of a message besides those of a request."""
        kind, stream_id, generate = raw.pop("type", None), raw.pop("stream_id", None), raw.pop("generate", None)
        raw.pop("stream", None)  # there is no other type
        if isinstance(stream_id, str) and len(stream_id) <= MOST_LABEL:
            self.stream_id = stream_id
        elif stream_id is not None:
            raise ParameterError(f"stream_id must be a string of at most {MOST_LABEL} characters.", param="stream_id")
        if kind != "response.create":
            raise ParameterError(f"Messages must have the type 'response.create', not {quoted(kind)}.", param="type")
        if not isinstance(generate, bool | None):
            raise ParameterError("generate must be true or false.", param="generate")
        self.generate = generate is not False

    async def _say(self, socket: WebSocket, text: bytes) -> None:
        if self.stream_id is not None:
            text = text[:-1] + b',"stream_id":' + encode(self.stream_id) + b"}"
        await socket.send(text)

    @staticmethod
    def _error(found: HttpError) -> dict[str, Any]:
        error = error_object(found)["error"]
        code = error["code"] if isinstance(error["code"], str) else None
        if found.status == 404 and found.param == "previous_response_id":
            code = "previous_response_not_found"
        return {"type": "error", "status": found.status, "error": {**error, "code": code}}
