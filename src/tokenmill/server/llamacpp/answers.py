"""llama.cpp's answers. Owns: their shapes, whole and streamed. Must not know: engines, sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import msgspec

from tokenmill.core.request import CompletionOutput
from tokenmill.server.errors import HttpError, error_object
from tokenmill.server.openai.completions import Completion
from tokenmill.server.openai.logprobs import FLOOR, Row, TokenNames
from tokenmill.server.request_job import Gathered, PromptTask
from tokenmill.server.sse import event

SETTINGS = (
    *("seed", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "max_tokens", "min_tokens", "ignore_eos", "stop"),
)
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
encode = msgspec.json.Encoder().encode


def error_body(found: HttpError) -> bytes:
    """OpenAI's error object with llama.cpp's types. If the context is too small, it also holds both counts."""
    error = error_object(found)["error"]
    error["code"] = found.status
    error["type"] = TYPES.get(found.status, "server_error" if found.status >= 500 else "invalid_request_error")
    if found.overflow is not None:
        error["type"] = "exceed_context_size_error"
        error |= {"n_prompt_tokens": found.overflow.prompt, "n_ctx": found.overflow.context}
    return encode({"error": error})


class Answers:
    """The answers to one request. `silent`: n_predict was 0, so the prompt was read and nothing is generated.
    `chosen`: the only fields of a whole answer, and of a stream's last event, that are sent."""

    def __init__(self, opened: Completion, *, silent: bool, chosen: Sequence[str] = ()) -> None:
        self.opened = opened
        self.silent = silent
        self.chosen = chosen
        self.names = TokenNames(opened.context.backend.info.tokenizer, as_ids=False)

    def whole(self, gathered: Gathered) -> Any:
        """One object, or a list if the request had several prompts."""
        found = [self._kept(self._final(task, accumulator.output().outputs[0])) for task, accumulator in gathered]
        return found if isinstance(self.opened.body.prompt, list) and len(found) > 1 else found[0]

    async def events(self) -> AsyncIterator[bytes]:
        """One event per step, with the figures at the end of each text."""
        texts: dict[int, CompletionOutput] = {}
        async for batch in self.opened.job.batches():
            for task, delta in batch:
                so_far = texts.setdefault(task.index, CompletionOutput(index=0, text="", token_ids=[]))
                so_far.text += delta.text
                if delta.text or delta.token_ids:
                    piece = self._piece(task, delta.text, delta.logprobs)
                    yield event({**piece, "tokens": [] if self.silent else list(delta.token_ids)})
                if delta.finish_reason is not None:
                    so_far.finish_reason, so_far.stop_reason = delta.finish_reason, delta.stop_reason
                    yield event(self._kept(self._final(task, so_far) | {"content": "", "tokens": []}))

    def _kept(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The fields that response_fields names, by their whole paths (`timings/prompt_n`)."""
        if not self.chosen:
            return answer
        return {path: value for path in self.chosen for value in _at(answer, path.split("/"))}

    def _piece(self, task: PromptTask, text: str, rows: Sequence[Row] | None) -> dict[str, Any]:
        return {
            "index": task.index,
            "content": "" if self.silent else text,
            "tokens": [],
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": task.num_tokens,
            "tokens_evaluated": len(task.request.prompt_ids),
            **self._probabilities(rows),
        }

    def _final(self, task: PromptTask, out: CompletionOutput) -> dict[str, Any]:
        text = "" if self.silent else out.text
        word = out.stop_reason if isinstance(out.stop_reason, str) else ""
        limit = self.silent or out.finish_reason == "length"
        params = task.request.params
        settings = {name: getattr(params, name) for name in SETTINGS}
        return {
            **self._piece(task, text, out.logprobs),
            "tokens": list(out.token_ids) if self.opened.body.return_token_ids and not self.silent else [],
            "stop": True,
            "model": self.opened.model,
            "generation_settings": {**settings, "stop": params.stops, "n_ctx": self._context},
            "prompt": task.request.prompt or "",
            "has_new_line": "\n" in text,
            "truncated": False,
            "stop_type": "limit" if limit else "word" if word else "eos",
            "stopping_word": word,
            "tokens_cached": task.cached,
            "timings": self._timings(task),
        }

    @property
    def _context(self) -> int:
        return self.opened.context.backend.info.max_model_len

    def _probabilities(self, rows: Sequence[Row] | None) -> dict[str, Any]:
        """Each token with the likeliest alternatives at its place."""
        top = self.opened.body.logprobs
        if not top or rows is None:
            return {}
        found = []
        for row in rows:
            chosen = next(iter(row))
            likely = sorted((entry.rank, token) for token, entry in row.items() if entry.rank <= top)[:top]
            found.append({**self._token(row, chosen), "top_logprobs": [self._token(row, token) for _, token in likely]})
        return {"completion_probabilities": found}

    def _token(self, row: Row, token: int) -> dict[str, Any]:
        entry = row[token]
        name, raw = self.names.name(token, entry), self.names.raw(token)
        return {"id": token, "token": name, "bytes": raw, "logprob": max(entry.logprob, FLOOR)}

    def _timings(self, task: PromptTask) -> dict[str, Any]:
        """How long the prompt and the answer took."""
        prompt, generated = len(task.request.prompt_ids) - task.cached, task.num_tokens
        t = task.figures.timeline if task.figures is not None else None
        first = t.first_token if t is not None else None
        before = 0.0 if t is None or first is None else max(0.0, first - (t.started or t.arrival))
        after = 0.0 if t is None or first is None else max(0.0, (t.last_token or first) - first)
        return {"cache_n": task.cached, **_rate("prompt", prompt, before), **_rate("predicted", generated, after)}


def _at(found: Any, path: Sequence[str]) -> Iterator[Any]:
    """The value at the end of a path, if there is one."""
    for name in path:
        if not isinstance(found, dict) or name not in found:
            return
        found = found[name]
    yield found


def _rate(name: str, count: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": count,
        f"{name}_ms": seconds * 1e3,
        f"{name}_per_token_ms": seconds * 1e3 / count if count else None,
        f"{name}_per_second": count / seconds if seconds else None,
    }
