"""`tokenmill chat`: talk with a model. Owns: the loop of reading, answering, and showing what an answer cost."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from tokenmill.cli.conversation import Conversation, Messages
from tokenmill.cli.errors import exit_code
from tokenmill.cli.flags import MODEL, ResolvedOptions, engine_flags, resolve_stored
from tokenmill.cli.generate import check_output
from tokenmill.cli.interrupts import Interrupts
from tokenmill.cli.loading import describe, load_engine
from tokenmill.cli.named_files import is_text
from tokenmill.cli.screen import Screen
from tokenmill.cli.terminal import harmless
from tokenmill.cli.typed_messages import NO_TEXT, at_terminal, messages
from tokenmill.cli.unloaded_model import lacks_template
from tokenmill.core.errors import EngineDeadError, ParameterError, TokenmillError

if TYPE_CHECKING:
    from tokenmill.core.request import RequestOutput, SamplingParams
    from tokenmill.engine.interfaces.async_llm import AsyncLLM

NO_TEMPLATE = (
    "{} has no chat template: give one with --chat-template FILE, or continue a text with "
    "`tokenmill generate MODEL -p TEXT`."
)


@dataclass(slots=True)
class Manner:
    """The settings of all answers, from the flags."""

    most: int | None
    template: str | None
    wrap: bool
    given: bool = False
    """The template was given on the command line, so no model's own one replaces it."""


@engine_flags
def chat(
    model: str = MODEL,
    system: str = typer.Option(None, "--system", help="The system message."),
    temperature: float = typer.Option(
        None, "--temperature", help="How random answers are; 0: always the likeliest token."
    ),
    max_tokens: int = typer.Option(
        None, "--max-tokens", min=1, help="Most tokens per answer (default: as many as fit)."
    ),
    chat_template: str = typer.Option(
        None, "--chat-template", metavar="FILE", help="A chat template that replaces the model's."
    ),
    wrap: bool = typer.Option(True, "--wrap/--no-wrap", help="Wrap lines between words (default: on)."),
    *,
    options: dict[str, Any],
) -> None:
    """Talk with a model. /help lists the commands. From a pipe, each line is one turn."""
    from tokenmill.server.preflight import read_template

    manner = Manner(max_tokens, read_template(chat_template), wrap, given=chat_template is not None)
    if system is not None and not is_text(system):
        raise ParameterError("--system is not UTF-8 text.")
    talk = Conversation(system=system)
    if temperature is not None:
        talk.set_temperature(temperature, "--temperature")
    llm = _load(model, options, manner, talk)
    failed: TokenmillError | None = None
    try:
        if at_terminal():
            _tell("/help lists what can be typed; Ctrl-C stops an answer, Ctrl-D or /bye leaves.\n")
        with asyncio.Runner() as runner, Interrupts(ours=at_terminal()) as interrupts:
            for text in messages(interrupts):
                failed = _turn(runner, llm, talk, text, manner, interrupts) or failed
                if talk.ended:
                    break
                if talk.settings.model is not None:
                    llm = _change(llm, options, manner, talk, interrupts)
    finally:
        llm.close()
    if failed is not None and not at_terminal():
        raise typer.Exit(exit_code(failed))


def _load(model: str | None, options: dict[str, Any], manner: Manner, talk: Conversation) -> AsyncLLM:
    """Load a model that can chat. If it is known before the load that it cannot, this is said before the load."""
    settled = resolve_stored(model, options)
    config, name = settled.config, settled.name
    _apply_stored(settled, manner, talk)
    if manner.template is None and lacks_template(config):
        raise ParameterError(NO_TEMPLATE.format(name))
    llm, seconds = load_engine(settled.keywords)
    try:
        for line in describe(name, llm.service.built, seconds):
            _tell(line)
        tokenizer = llm.service.built.tokenizer
        if tokenizer is None:
            raise ParameterError("This model has no tokenizer, so it cannot chat.")
        if tokenizer.chat_template is None and manner.template is None:
            raise ParameterError(NO_TEMPLATE.format(name))
    except BaseException:
        llm.close()
        raise
    talk.model = name
    return llm


def _apply_stored(settled: ResolvedOptions, manner: Manner, talk: Conversation) -> None:
    """Apply what a stored model says about conversations. Flags that were typed win, and a conversation that has begun
    goes on."""
    from tokenmill.server.preflight import read_template

    stored_server = settled.stored.server if settled.stored is not None else {}
    if not manner.given:
        manner.template = read_template(stored_server.get("chat_template"))
    opening = stored_server.get("opening") or {}
    if not talk.turns:
        talk.system = opening.get("system") if talk.system is None else talk.system
        for message in opening.get("messages", ()):
            talk.say(message["role"], message["content"])


def _change(
    llm: AsyncLLM, options: dict[str, Any], manner: Manner, talk: Conversation, interrupts: Interrupts
) -> AsyncLLM:
    """Change to another model. If it cannot be loaded, the previous one is loaded again."""
    old, new, talk.settings.model = talk.model, talk.settings.model, None
    others = {name: value for name, value in options.items() if name not in ("model", "served_model_name")}
    before = talk.system, list(talk.turns)
    closed = False
    try:
        with interrupts.allowed():
            settled = resolve_stored(new, others)
            own = settled.stored is not None and "chat_template" in settled.stored.server
            if not manner.given and not own and lacks_template(settled.config):
                raise ParameterError(NO_TEMPLATE.format(new))
            closed = True
            llm.close()
            return _load(new, others, manner, talk)
    except EngineDeadError:
        raise
    except KeyboardInterrupt:
        _tell("\n(stopped)")
    except (TokenmillError, OSError, MemoryError) as error:
        _complain(error)
    if not closed:
        return llm
    llm.close()  # it may have been stopped in the middle
    talk.system, talk.turns = before
    with interrupts.allowed():
        return _load(old, others, manner, talk)


def _turn(
    runner: asyncio.Runner, llm: AsyncLLM, talk: Conversation, text: str, manner: Manner, interrupts: Interrupts
) -> TokenmillError | None:
    """One message: a command, or a question with its answer. Returns the error, if it failed."""
    if not text.strip():
        return None
    failed = None
    try:
        if not is_text(text):
            raise ParameterError(NO_TEXT)
        if text.startswith("/"):
            with interrupts.allowed():
                reply = talk.command(text)
            _tell(reply)
            return None
        talk.say("user", text)
        if waiting := talk.open_calls():
            _tell(f"(and the result of {waiting[0]['function']['name']}?)")
            return None
        interrupts.run(runner, _answer(llm, talk, manner))
    except KeyboardInterrupt:
        if not at_terminal():
            raise
        _tell("\n(stopped)")
    except EngineDeadError:
        raise
    except TokenmillError as error:
        failed = error
        _complain(error)
    talk.take_back()
    return failed


async def _answer(llm: AsyncLLM, talk: Conversation, manner: Manner) -> None:
    """Stream an answer. What has been said stays in the conversation, even if the answer is stopped."""
    from tokenmill.server.assistant_turn import plan_turn
    from tokenmill.text.messages.detect import find_format
    from tokenmill.text.messages.message import Message

    built = llm.service.built
    context, tokenizer = built.facts.max_model_len, built.tokenizer
    assert tokenizer is not None
    template = manner.template or tokenizer.chat_template
    form = find_format(template)
    extra: dict[str, Any] = {"chat_template": manner.template} if manner.template is not None else {}
    if talk.settings.tools:
        extra["tools"] = talk.settings.tools

    def count(said: Messages) -> int:
        return len(llm.reader.chat(said, **extra)[1])

    dropped = await asyncio.to_thread(talk.fit, count, context)
    if dropped:
        _tell(f"(the context is full: the oldest {dropped} messages are forgotten)")
    prompt, ids = await asyncio.to_thread(lambda: llm.reader.chat(talk.messages(), **extra))
    usual = manner.most or built.generation.get("max_new_tokens") or context
    params = _params(llm, talk, min(usual, context - len(ids)))
    if talk.settings.tools and form.calls is None:
        raise ParameterError("This model's chat template shows no form for tool calls; /tools takes the tools away.")
    turn, params = plan_turn(form, _wish(talk), params, prompt, tokenizer=tokenizer, template=template)
    parser = None if turn.plain else turn.parser()
    screen, heard, output, read = Screen(wrap=manner.wrap, folded=talk.settings.folded), Message(), None, 0
    whole = False
    try:
        async for output in llm.generate({"prompt_token_ids": ids}, params, lora_request=llm.first_adapter):
            if not output.outputs:
                continue
            new, read = output.outputs[0].text[read:], len(output.outputs[0].text)
            if parser is None:
                screen.say(new)
                continue
            _show(screen, heard, parser.feed(new))
        if parser is not None:
            _show(screen, heard, parser.finish())
        assert output is not None
        check_output(llm, output)
        whole = True
    finally:
        screen.end()
        calls = [(turn.call_id(call.id), call.name, call.arguments or "{}") for call in heard.calls]
        if whole or calls or screen.said:  # a question that was stopped before its answer is taken back
            talk.answer(screen.said, screen.thought, calls)
        for _, name, arguments in calls:
            _tell(f"calls {name}({arguments})")
    if calls:
        _tell(f"(type what {calls[0][1]} gives)")
    _tell(_cost(output, context))


def _show(screen: Screen, heard: Any, events: Any) -> None:
    heard.add(events)
    for event in events:
        if event.kind == "content" and event.text:
            screen.say(event.text)
        elif event.kind == "reasoning" and event.text:
            screen.reason(event.text)


def _wish(talk: Conversation) -> Any:
    from tokenmill.server.assistant_turn import ToolWish

    functions = [tool["function"] for tool in talk.settings.tools]
    return ToolWish({each["name"]: each.get("parameters") or {"type": "object"} for each in functions})


def _params(llm: AsyncLLM, talk: Conversation, most: int) -> SamplingParams:
    import msgspec

    from tokenmill.engine.options.generation import default_params

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


def _complain(error: Exception) -> None:
    message = str(error) or "There is not enough memory for it."
    with contextlib.suppress(OSError):
        typer.secho(harmless(message) if sys.stderr.isatty() else message, fg="red", err=True)


def _tell(text: str) -> None:
    """A remark beside the conversation, on standard error: standard output holds only answers. It may be closed."""
    if text:
        with contextlib.suppress(OSError):
            typer.secho(harmless(text) if sys.stderr.isatty() else text, dim=True, err=True)
