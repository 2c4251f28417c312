"""Endpoints of stored chats. Owns: their paths. Must not know: engines, how chats are answered."""

from __future__ import annotations

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from tokenmill.server.context import Context
from tokenmill.server.inputs.headers import METADATA
from tokenmill.server.openai.stored.kept_chats import KeptChat
from tokenmill.server.openai.stored.schemas import UpdateRequest
from tokenmill.server.pages import list_page, read_page
from tokenmill.server.routing import Api, delete, get, json_answer, post, read_body, tenant

PATH = "/v1/chat/completions"


def add_routes(app: FastAPI, context: Context) -> None:
    """List, read, change and forget stored chats."""

    def found(request: Request) -> KeptChat:
        return context.store.find(KeptChat, request.path_params["completion_id"], tenant(request))

    async def list_chats(request: Request) -> Response:
        """List stored chats, the oldest first."""
        query, page = request.query_params, read_page(request.query_params, order="asc")
        wanted = {name[1]: value for key, value in query.items() if (name := METADATA.fullmatch(key))}
        chats = [
            chat
            for chat in context.store.all(KeptChat, tenant(request))
            if not chat.busy
            and query.get("model", chat.model) == chat.model
            and wanted.items() <= chat.metadata.items()
        ]
        size = sum(chat.size for chat in chats)
        return await context.bodies.run_in_thread(
            size, lambda: json_answer(list_page(chats, page, lambda chat: chat.id, KeptChat.shown))
        )

    async def read(request: Request) -> Response:
        """Get a stored chat."""
        chat = found(request)
        return await context.bodies.run_in_thread(chat.size, lambda: json_answer(chat.shown()))

    async def update(request: Request) -> Response:
        """Change a stored chat's metadata."""
        body = await read_body(context, request, UpdateRequest)
        chat = found(request)
        chat.shown()
        chat.metadata = dict(body.metadata or {})
        context.store.weigh(chat)
        return json_answer(chat.shown())

    async def forget(request: Request) -> Response:
        """Delete a stored chat."""
        name = found(request).id
        context.store.delete(KeptChat, name, tenant(request))
        return json_answer({"id": name, "object": "chat.completion.deleted", "deleted": True})

    async def messages(request: Request) -> Response:
        """List the messages of a stored chat's request, the first one first."""
        chat, page = found(request), read_page(request.query_params, order="asc")

        def shown() -> Response:
            return json_answer(list_page(msgspec.json.decode(chat.messages), page, lambda m: str(m["id"]), dict))

        return await context.bodies.run_in_thread(len(chat.messages), shown)

    one = f"{PATH}/{{completion_id}}"
    get(app, PATH, list_chats)
    get(app, one, read)
    post(app, one, update, UpdateRequest)
    delete(app, one, forget)
    get(app, f"{one}/messages", messages)


STORED_CHATS = Api(add_routes, prefixes=(f"{PATH}/",))
