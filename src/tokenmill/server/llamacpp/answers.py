"""llama.cpp's answers. Owns: their shapes, whole and streamed. Must not know: engines, sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
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
encode = msgspec.json.Encoder().encode


def error_body(found: HttpError) -> bytes:
    """OpenAI's error object. If the context is too small, it also holds both counts."""
    body = error_object(found)
    if found.overflow is not None:
        body["error"] |= {"n_prompt_tokens": found.overflow.prompt, "n_ctx": found.overflow.context}
    return encode(body)


class Answers:
    """The answers to one request. `silent`: n_predict was 0, so the prompt was read and nothing is generated."""

    def __init__(self, opened: Completion, *, silent: bool) -> None:
        self.opened = opened
        self.silent = silent
        self.names = TokenNames(opened.context.backend.info.tokenizer, as_ids=False)

    def whole(self, gathered: Gathered) -> Any:
        """One object, or a list if the request had several prompts."""
        found = [self._final(task, accumulator.output().outputs[0]) for task, accumulator in gathered]
        return found if isinstance(self.opened.body.prompt, list) and len(found) > 1 else found[0]

    async def events(self) -> AsyncIterator[bytes]:
        """One event per step, with the figures at the end of each text."""
        texts: dict[int, CompletionOutput] = {}
        async for batch in self.opened.job.batches():
            for task, delta in batch:
                so_far = texts.setdefault(task.index, CompletionOutput(index=0, text="", token_ids=[]))
                so_far.text += delta.text
                if delta.text or delta.logprobs or (delta.token_ids and self.opened.body.return_token_ids):
                    yield event(self._piece(task, delta.text, delta.token_ids, delta.logprobs))
                if delta.finish_reason is not None:
                    so_far.finish_reason, so_far.stop_reason = delta.finish_reason, delta.stop_reason
                    yield event(self._final(task, so_far) | {"content": "", "tokens": []})

    def _piece(self, task: PromptTask, text: str, ids: Sequence[int], rows: Sequence[Row] | None) -> dict[str, Any]:
        return {
            "index": task.index,
            "content": "" if self.silent else text,
            "tokens": list(ids) if self.opened.body.return_token_ids and not self.silent else [],
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
            **self._piece(task, text, out.token_ids, out.logprobs),
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


def _rate(name: str, count: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": count,
        f"{name}_ms": seconds * 1e3,
        f"{name}_per_token_ms": seconds * 1e3 / count if count else None,
        f"{name}_per_second": count / seconds if seconds else None,
    }
