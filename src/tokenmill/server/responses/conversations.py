"""Endpoints of conversations. Owns: their paths, and changes of what is kept.

Must not know: engines, how responses are made.
"""

from __future__ import annotations

import uuid

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from tokenmill.server.context import Context
from tokenmill.server.pages import list_page, read_page
from tokenmill.server.responses.conversation import Conversation, encoded_items
from tokenmill.server.responses.conversation_items import full_items
from tokenmill.server.responses.schemas import CreateConversation, CreateItems, UpdateConversation
from tokenmill.server.routing import body_size, delete, get, json_answer, post, read_body, tenant

PATH = "/v1/conversations"
Pair = tuple[str, bytes]


def add_conversations(app: FastAPI, context: Context) -> None:
    """Create, get, change and delete conversations and their items."""

    def found(request: Request) -> Conversation:
        return context.store.find(Conversation, request.path_params["conversation_id"], tenant(request))

    async def read_items(request: Request, given: list[dict[str, object]], size: int) -> list[Pair]:
        return await context.bodies.run_in_thread(size, lambda: encoded_items(full_items(given, "items")))

    async def create(request: Request) -> Response:
        """Create a conversation."""
        size = body_size(request)
        body = await read_body(context, request, CreateConversation)
        items = await read_items(request, body.items or [], size)
        made = Conversation(tenant(request), f"conv_{uuid.uuid4().hex}", metadata=body.metadata or {})
        made.add(items)
        context.store.add(made)
        return json_answer(made.shown())

    async def read(request: Request) -> Response:
        """Get a conversation without its items."""
        return json_answer(found(request).shown())

    async def update(request: Request) -> Response:
        """Change a conversation's metadata."""
        body = await read_body(context, request, UpdateConversation)
        conversation = found(request)
        conversation.metadata = body.metadata
        context.store.weigh(conversation)
        return json_answer(conversation.shown())

    async def forget(request: Request) -> Response:
        """Delete a conversation."""
        name = request.path_params["conversation_id"]
        context.store.delete(Conversation, name, tenant(request))
        return json_answer({"id": name, "object": "conversation.deleted", "deleted": True})

    async def add_items(request: Request) -> Response:
        """Add items to a conversation."""
        size = body_size(request)
        body = await read_body(context, request, CreateItems)
        items = await read_items(request, body.items, size)
        conversation = found(request)
        conversation.check_count(len(items))
        context.store.check(conversation, sum(len(data) for _, data in items))
        conversation.add(items)
        context.store.weigh(conversation)
        ends = {"first_id": items[0][0], "last_id": items[-1][0], "has_more": False}
        return json_answer({"object": "list", "data": [msgspec.Raw(data) for _, data in items], **ends})

    async def list_items(request: Request) -> Response:
        """List a conversation's items, the newest first."""
        page, conversation = read_page(request.query_params), found(request)
        return json_answer(list_page(list(conversation.items.items()), page, _name, _shown))

    async def read_item(request: Request) -> Response:
        """Get one item."""
        return json_answer(msgspec.Raw(found(request).find(request.path_params["item_id"])))

    async def forget_item(request: Request) -> Response:
        """Delete one item."""
        conversation = found(request)
        conversation.remove(request.path_params["item_id"])
        context.store.weigh(conversation)
        return json_answer(conversation.shown())

    one, items = f"{PATH}/{{conversation_id}}", f"{PATH}/{{conversation_id}}/items"
    post(app, PATH, create, CreateConversation)
    get(app, one, read)
    post(app, one, update, UpdateConversation)
    delete(app, one, forget)
    get(app, items, list_items)
    post(app, items, add_items, CreateItems)
    get(app, f"{items}/{{item_id}}", read_item)
    delete(app, f"{items}/{{item_id}}", forget_item)


def _name(pair: Pair) -> str:
    return pair[0]


def _shown(pair: Pair) -> msgspec.Raw:
    return msgspec.Raw(pair[1])
