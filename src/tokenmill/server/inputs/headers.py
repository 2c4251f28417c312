"""What comes beside a body: request headers and query parameters. Owns: how each one that clients rely on is treated.

Other headers pass in silence, because browsers and proxies add them. Must not know: bodies, endpoints.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from starlette.datastructures import ImmutableMultiDict

from tokenmill.core.errors import ParameterError
from tokenmill.core.unread_names import Unknown, header_text
from tokenmill.server.access import OPEN_PATHS
from tokenmill.server.pages import PAGED

DONE_HEADERS: Mapping[str, str] = {
    "authorization": "the key",
    "x-api-key": "the key",
    "content-type": "must be JSON",
    "expect": "`100-continue` is answered; anything else gets 417",
    "content-encoding": "refused unless `identity`",
    "host": "must be a name of this server",
    "origin": "must be allowed",
    "x-request-id": "the id of the answer",
    "anthropic-version": "`/v1/models` answers as Anthropic does",
    "x-session-id": "as the field `session_id`",
    "x-vllm-priority": "as the field `priority`, and wins over it",
    "x-data-parallel-rank": "which engine",
    "traceparent": "the trace that the request's span belongs to",
    "tracestate": "goes along with `traceparent`",
}
TOLD_HEADERS: Mapping[str, str] = {
    "idempotency-key": "a request that is sent twice is answered twice",
    "x-idempotency-key": "a request that is sent twice is answered twice",
    "endpoint-load-metrics-format": "answers carry no load report: see /load and /metrics",
    "prefer": "use `background` in /v1/responses",
    "x-priority": "use `X-Vllm-Priority`",
    "x-request-timeout": "use the field `timeout`",
    "x-request-timeout-ms": "use the field `timeout`",
    "x-smg-routing-key": "use `X-Session-ID`",
    "x-smg-target-worker": "use `X-data-parallel-rank`",
}
"""Headers that ask for something that this server does not do."""
HARMLESS_HEADERS: Mapping[str, str] = {
    "accept": "the body's `stream` decides",
    "user-agent": "nobody is treated differently",
    "x-stainless-*": "how the client's library describes itself",
    "openai-organization": "whose account it is: there are none",
    "openai-project": "whose account it is: there are none",
    "openai-beta": "a beta adds a path or a field, which is judged by itself",
    "anthropic-beta": "a beta adds a field or a block, which is judged by itself",
    "anthropic-dangerous-direct-browser-access": "`--allowed-origins` decides",
    "x-client-request-id": "a label of the client's own",
    "x-app": "a label of the client's own",
    "http-referer": "a label of the client's own",
    "x-title": "a label of the client's own",
    "x-use-cache": "answers are never cached",
    "x-wait-for-model": "the model stays loaded",
    "x-use-gpu": "the model stays where it is",
    "x-compute-type": "the model stays where it is",
    "baggage": "goes along with `traceparent`",
}
QUERIES: Mapping[str, frozenset[str]] = {
    "/v1/responses/{response_id}": frozenset({"stream", "starting_after"}),
    "/v1/responses/{response_id}/input_items": PAGED,
    "/v1/conversations/{conversation_id}/items": PAGED,
    "/v1/chat/completions": PAGED | {"model"},
    "/v1/chat/completions/{completion_id}/messages": PAGED,
    "/v1/models": frozenset({"after_id", "before_id", "limit"}),
    "/v1/engine": frozenset({"model", "since"}),
    "/v1/card": frozenset({"model"}),
    "/sleep": frozenset({"level", "mode", "model"}),
    "/wake_up": frozenset({"tags", "model"}),
    "/is_sleeping": frozenset({"model"}),
    **dict.fromkeys(("/api/generate", "/api/chat", "/api/show"), frozenset({"model"})),
    "/slots": frozenset({"fail_on_no_slot"}),
    "/v1/requests": frozenset({"limit"}),
}
"""Query parameters that have an effect, by path. Paths that are about one model also take `model`."""
PROBES = frozenset({*OPEN_PATHS, "/ping", "/v2/health/live", "/v2/health/ready"})
"""Whoever asks here whether the server is up asks nothing else. Query parameters are not judged, with
--strict-fields neither."""
REPEATED = frozenset({"tags"})
"""Query parameters that may be given several times. Of another one, all but one would have no effect."""
METADATA = re.compile(r"metadata\[(.{1,64})\]", re.DOTALL)
"""For lists of stored chats: only those whose metadata has this entry."""
HARMLESS_QUERIES: Mapping[str, str] = {
    "api-version": "there is one version",
    "beta": "a beta adds a field or a block, which is judged by itself",
    "include": "what there is comes in any case",
    "include[]": "what there is comes in any case",
}
REFUSED_QUERIES: Mapping[tuple[str, str], tuple[str, str]] = {
    ("/v1/responses/{response_id}/input_items", "before"): ("lists go on after an entry, in either order", ""),
}
"""(path, name) -> why it is refused, and the value that asks for nothing."""


def ineffective_headers(headers: Mapping[str, str]) -> Iterator[str]:
    """Headers of this request that ask for something that this server does not do."""
    present = set(headers)
    return (name for name in TOLD_HEADERS if name in present)


def judge_query(path: str, given: ImmutableMultiDict[str, str], unknown: Unknown, *, about_model: bool) -> None:
    """Refuse the names on the list of refused ones and those that come twice, and collect the names without effect.
    `about_model`: the path is about one model, which `model` may name."""
    for name in given:
        if name in HARMLESS_QUERIES:
            continue
        if _has_effect(path, name, about_model=about_model):
            if len(given.getlist(name)) > 1 and name not in REPEATED:
                raise ParameterError(f"{header_text(name)} is in the query more than once.", param=header_text(name))
            continue
        refused = REFUSED_QUERIES.get((path, name))
        if refused is None:
            unknown.tell(header_text(name))
        elif given[name] != refused[1]:
            raise ParameterError(f"{name} is not supported in this version: {refused[0]}.", param=header_text(name))


def _has_effect(path: str, name: str, *, about_model: bool) -> bool:
    known = (name == "model" and about_model) or name in QUERIES.get(path, ())
    return known or (path == "/v1/chat/completions" and METADATA.fullmatch(name) is not None)


def judge_unread_body(
    path: str, fields: Mapping[str, bytes], query: ImmutableMultiDict[str, str], unknown: Unknown
) -> None:
    """The same for the fields of a body that nobody reads. A name that the query takes is refused, because the client
    relies on it, unless the query says the same."""
    for name, said in fields.items():
        if name in query and bytes(said) == json.dumps(query[name], ensure_ascii=False).encode():
            continue
        if name in QUERIES.get(path, ()):
            raise ParameterError(f"{name} belongs into the query, not into a body.", param=name)
        if unknown.more:
            return
        unknown.tell(header_text(name))


def as_headers(unknown: Unknown) -> Iterator[tuple[bytes, bytes]]:
    """The headers of an answer that report these names."""
    if unknown.names:
        more = ", ..." if unknown.more else ""
        yield b"x-tokenmill-ignored", (", ".join(unknown.names) + more).encode()
    if hints := dict.fromkeys(hint for hint in unknown.names.values() if hint is not None):
        yield b"x-tokenmill-did-you-mean", ", ".join(hints).encode()
