"""`tokenmill chat`: talk with a model. Owns: the loop of reading, answering, and telling what an answer cost."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import typer

from tokenmill.cli.conversation import Conversation, Messages
from tokenmill.cli.flags import MODEL, engine_flags, settle
from tokenmill.cli.generate import check_output
from tokenmill.cli.loading import describe, load
from tokenmill.cli.reading import at_terminal, messages
from tokenmill.cli.terminal import Live
from tokenmill.core.errors import EngineDeadError, ParameterError, TokenmillError

if TYPE_CHECKING:
    from tokenmill.core.request import RequestOutput, SamplingParams
    from tokenmill.engine.async_llm import AsyncLLM


@engine_flags
def chat(
    model: str = MODEL,
    system: str = typer.Option(None, "--system", help="The system message."),
    temperature: float = typer.Option(None, "--temperature", help="0: always the likeliest token."),
    max_tokens: int = typer.Option(None, "--max-tokens", min=1, help="Most tokens per answer (default: what fits)."),
    *,
    options: dict[str, Any],
) -> None:
    """Talk with a model; /help lists what can be typed. From a pipe, each line is one turn."""
    _, keywords = settle(model, options)
    talk = Conversation(system=system)
    if temperature is not None:
        talk.command(f"/temp {temperature}")
    llm, seconds = load(keywords)
    try:
        for line in describe(llm.service.built, seconds):
            _tell(line)
        _check_chats(llm)
        if at_terminal():
            _tell("/help lists what can be typed; Ctrl-C stops an answer, Ctrl-D leaves.\n")
        with asyncio.Runner() as runner:
            for text in messages():
                _turn(runner, llm, talk, text, max_tokens)
                if talk.ended:
                    break
    finally:
        llm.close()


def _turn(runner: asyncio.Runner, llm: AsyncLLM, talk: Conversation, text: str, most: int | None) -> None:
    """One message: a command, or a question with its answer."""
    if not text.strip():
        return
    try:
        if text.startswith("/"):
            _tell(talk.command(text))
            return
        talk.say("user", text)
        runner.run(_answer(llm, talk, most))
    except KeyboardInterrupt:
        _tell("\n(stopped)")
    except EngineDeadError:
        raise
    except TokenmillError as error:
        typer.secho(str(error), fg="red", err=True)
    talk.take_back()


async def _answer(llm: AsyncLLM, talk: Conversation, most: int | None) -> None:
    """Stream an answer; what has been said stays in the conversation, even when it is stopped."""
    context = llm.service.built.facts.max_model_len

    def count(said: Messages) -> int:
        return len(llm.reader.chat(said)[1])

    dropped = await asyncio.to_thread(talk.fit, count, context)
    if dropped:
        _tell(f"(the context is full: the oldest {dropped} messages are forgotten)")
    _, ids = await asyncio.to_thread(llm.reader.chat, talk.messages())
    params = _params(llm, talk, min(most or context, context - len(ids)))
    screen, output = Live(), None
    try:
        async for output in llm.generate({"prompt_token_ids": ids}, params):
            if output.outputs:
                screen.show(output.outputs[0].text)
        assert output is not None
        check_output(llm, output)
    finally:
        screen.end()
        talk.say("assistant", screen.shown)
    _tell(_cost(output, context))


def _params(llm: AsyncLLM, talk: Conversation, most: int) -> SamplingParams:
    import msgspec

    from tokenmill.engine.prompts import default_params

    params = msgspec.structs.replace(default_params(llm.service.built.generation), max_tokens=most)
    if talk.temperature is not None:
        params = msgspec.structs.replace(params, temperature=talk.temperature)
    return params


def _cost(output: RequestOutput, context: int) -> str:
    """Tokens, speed and context used by one answer."""
    count, metrics = len(output.outputs[0].token_ids), output.metrics
    used = len(output.prompt_token_ids) + count
    parts = [f"{count} tokens"]
    if metrics is not None and metrics.first_token is not None and metrics.last_token is not None:
        spent = metrics.last_token - metrics.first_token
        if count > 1 and spent > 0:
            parts.append(f"{(count - 1) / spent:.1f} tokens/s")
        parts.append(f"first after {1000 * (metrics.first_token - metrics.arrival):.0f} ms")
    parts.append(f"context {used} of {context}")
    return f"({', '.join(parts)})\n"


def _check_chats(llm: AsyncLLM) -> None:
    tokenizer = llm.service.built.tokenizer
    if tokenizer is None:
        raise ParameterError("This model has no tokenizer, so nobody can talk with it.")
    if tokenizer.chat_template is None:
        raise ParameterError("This model has no chat template: it continues text (tokenmill generate), no more.")


def _tell(text: str) -> None:
    """A remark beside the conversation: answers alone go to standard output."""
    if text:
        typer.secho(text, dim=True, err=True)
