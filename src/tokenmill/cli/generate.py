"""`tokenmill generate`: continue one prompt. Owns: where the prompt comes from and how the text goes out."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tokenmill.cli.flags import MODEL, engine_flags, flag, resolve_options, spelling, with_flags
from tokenmill.cli.loading import load_engine
from tokenmill.cli.named_files import is_text
from tokenmill.cli.terminal import Live
from tokenmill.core.errors import EngineDeadError, ParameterError, SequenceError, why
from tokenmill.core.text_file import read_all, read_text_file

if TYPE_CHECKING:
    from tokenmill.core.request import RequestOutput
    from tokenmill.engine.interfaces.async_llm import AsyncLLM

MOST_CHARS = 16 << 20
DEFAULT_TOKENS = 256


SAMPLING = {
    "max_tokens": flag("max_tokens", int, f"Most tokens to generate (default: {DEFAULT_TOKENS})."),
    "temperature": flag("temperature", float, "How random the text is; 0: always the likeliest token."),
    "top_p": flag("top_p", float, "Sample from the likeliest tokens whose probabilities add up to this."),
    "top_k": flag("top_k", int, "Sample from this many tokens (0: all)."),
    "min_p": flag("min_p", float, "Leave out tokens less likely than this part of the likeliest one."),
    "repetition_penalty": flag("repetition_penalty", float, "Above 1: repeat less."),
    "n": flag("n", int, "Number of continuations."),
    "stop": flag("stop", list[str], "End at this text (may be repeated)."),
    "ignore_eos": flag("ignore_eos", bool, "Continue after the end of text."),
}


@engine_flags
@with_flags("sampling", SAMPLING)
def generate(
    model: str = MODEL,
    prompt: str = typer.Option(None, "--prompt", "-p", help="The text to continue; `-` reads standard input."),
    prompt_file: Path = typer.Option(None, "--prompt-file", help="Read the prompt from this file."),
    stream: bool = typer.Option(
        None, "--stream/--no-stream", help="Print the text as it comes (default: on a terminal)."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object with ids, reasons and timings."),
    *,
    sampling: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Continue a prompt and print the text. Settings that are not given are the model's own defaults."""
    config, keywords = resolve_options(model, options)
    text = _read_prompt(prompt, prompt_file)
    most = (keywords.get("override_generation_config") or {}).get("max_new_tokens", DEFAULT_TOKENS)
    given = {"max_tokens": most, **({"seed": options["seed"]} if "seed" in options else {}), **sampling}
    _check_texts(text, given)
    _check(given)
    if stream and (as_json or given.get("n", 1) != 1):
        other = "--json" if as_json else "--n"
        raise ParameterError(f"--stream prints one text as it comes, and {other} prints everything at the end.")
    live = not as_json and given.get("n", 1) == 1 and (sys.stdout.isatty() if stream is None else stream)
    llm, seconds = load_engine(keywords)
    tokenizer = llm.service.built.tokenizer
    chats = tokenizer is not None and tokenizer.chat_template is not None
    hint = f"`tokenmill chat {config.model.model}` answers questions"
    if live and sys.stderr.isatty() and chats:
        typer.secho(f"(the text goes on; {hint})", dim=True, err=True)
    try:
        output = asyncio.run(_generate_one(llm, text, given, live))
    finally:
        llm.close()
    if as_json:
        print(json.dumps({"model": config.model.model, **report(output, seconds)}, ensure_ascii=False))
    elif not live:
        print("\n\n".join(out.text for out in output.outputs))
    if not as_json and not any(out.text.strip() for out in output.outputs):
        typer.secho(f"(the model ended its text at once{f'; {hint}' if chats else ''})", dim=True, err=True)


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise ParameterError("--prompt and --prompt-file both give the prompt: leave one of them out.")
    if prompt is None and file is None:
        raise ParameterError("Give the prompt with --prompt TEXT, --prompt - (standard input) or --prompt-file FILE.")
    if file is None:
        assert prompt is not None
        return _read_input() if prompt == "-" else prompt
    return read_text_file(file, "--prompt-file", MOST_CHARS)


def _read_input() -> str:
    if sys.stdin is None:  # the shell's <&-
        raise ParameterError("--prompt - reads standard input, which is closed.")
    try:
        return read_all(sys.stdin, "Standard input", MOST_CHARS)
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"Standard input cannot be read: {why(error)}.") from error


def _check_texts(prompt: str, given: dict[str, Any]) -> None:
    """Refuse bytes that are no text: the model would read something else in their place."""
    for name, value in {"the prompt": prompt, **given}.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, str) and not is_text(each):
                raise ParameterError(f"{name if name == 'the prompt' else spelling(name)} is not UTF-8 text.")


def _check(given: dict[str, Any]) -> None:
    """Refuse bad sampling parameters before the model loads."""
    from tokenmill.core.request import SamplingParams

    SamplingParams(**given)


async def _generate_one(llm: AsyncLLM, prompt: str, given: dict[str, Any], live: bool) -> RequestOutput:
    """The complete output. With `live`, its text is also written to the terminal as it comes."""
    from tokenmill.core.request import SamplingParams
    from tokenmill.engine.options.generation import DEFAULTS, default_params

    defaults = default_params(llm.service.built.generation)
    params = SamplingParams(**{**{name: getattr(defaults, name) for name in DEFAULTS}, **given})
    screen, output = Live(), None
    async for output in llm.generate(prompt, params, lora_request=llm.first_adapter):
        if live and output.outputs:
            screen.show(output.outputs[0].text)
    if live:
        screen.end()
    assert output is not None
    check_output(llm, output)
    return output


def check_output(llm: AsyncLLM, output: RequestOutput) -> None:
    """Raise the error that ended an output."""
    for out in output.outputs:
        if out.finish_reason == "error":
            if llm.service.dead is not None:
                raise EngineDeadError(llm.service.dead)
            raise SequenceError(str(out.stop_reason))


def report(output: RequestOutput, load_seconds: float) -> dict[str, Any]:
    """The record that --json prints for one request."""
    first, metrics = output.outputs[0], output.metrics
    count = sum(len(out.token_ids) for out in output.outputs)
    timings: dict[str, float | None] = {"load_s": round(load_seconds, 3), "ttft_ms": None, "total_ms": None}
    if metrics is not None and metrics.first_token is not None and metrics.last_token is not None:
        total = metrics.last_token - metrics.arrival
        timings["ttft_ms"] = round(1000 * (metrics.first_token - metrics.arrival), 3)
        timings["total_ms"] = round(1000 * total, 3)
        timings["output_tokens_per_s"] = round(count / total, 3)
    return {
        "prompt": output.prompt,
        "text": first.text,
        "token_ids": first.token_ids,
        "finish_reason": first.finish_reason,
        "stop_reason": first.stop_reason,
        "outputs": [
            {
                "index": out.index,
                "text": out.text,
                "token_ids": out.token_ids,
                "finish_reason": out.finish_reason,
                "stop_reason": out.stop_reason,
            }
            for out in output.outputs
        ],
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
        "output_tokens": count,
        "timings": timings,
    }
