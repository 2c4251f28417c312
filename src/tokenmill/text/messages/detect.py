"""Which format a model writes. Owns: finding it by the chat template's literals, and the names that people may give.

A template shows earlier calls and reasoning as the model writes them, so its literals reveal the family. Must not know:
models' names, requests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tokenmill.core.errors import ParameterError
from tokenmill.text.messages.describe import CallFormat, MessageFormat, Thinking
from tokenmill.text.messages.families import CALL_ALIASES, CALL_FORMATS, THINKING, THINKING_ALIASES

AUTO, NONE = "auto", "none"
_CALL_MARKS: tuple[tuple[tuple[str, ...], str], ...] = (  # all of them must be there; the first row that fits
    (("<|channel|>", "to=functions"), "harmony"),
    (("<|channel|>", "commentary"), "harmony"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("｜DSML｜", "function_calls>"), "deepseek_v32"),
    (("｜DSML｜",), "deepseek_v4"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<｜tool_calls_begin｜>", "<steptml:"), "step3"),
    (("<steptml:invoke",), "step3"),
    (("[TOOL_CALLS]", "[ARGS]"), "mistral"),
    (("[TOOL_CALLS]",), "mistral_v3"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<tool_calls>[",), "tool_calls"),
    (("<tool_calls>",), "minimax"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<TOOLCALL>",), "nemotron"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|tool_list_start|>",), "lfm2"),
    (("List of tools: [", "keep_past_thinking"), "lfm2"),
    (("<|role_sep|>", "<|message_sep|>"), "gigachat3"),
    (("<|tools_prefix|>",), "apertus"),
    (("<function_calls>",), "olmo3"),
    (("<arg_key>",), "glm45"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<|action_start|>",), "internlm"),
    (("<|START_ACTION|>",), "cohere"),
    (("Action:", "```json", "tool_name"), "cohere"),
    (("<start_function_call>",), "functiongemma"),
    (("<|tool_call>call:",), "gemma4"),
    (("```tool_code",), "gemma"),
    (("functools[",), "phi4_mini"),
    (("<|tool_call|>", "<|/tool_call|>"), "phi4_mini"),
    (("<|tool|>", "<|/tool|>"), "phi4_mini"),
    (("<|tool_call|>",), "granite"),
    (("<function_call>",), "granite"),
    ((">>>all",), "functionary_v32"),
    (("<function=",), "functionary"),
    (("<longcat_tool_call>",), "longcat"),
    (("<tool_call>",), "hermes"),
    (("<|python_start|>",), "pythonic"),
    (("[func_name1(",), "pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (('"parameters": dictionary of argument name',), "llama3_json"),
)
_THINKING_MARKS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>",), "harmony"),
    (("[THINK]",), "mistral"),
    (("<|START_THINKING|>",), "cohere"),
    (("<seed:think>",), "seed_oss"),
    (("[BEGIN FINAL RESPONSE]",), "apriel"),
    (("<|channel>",), "gemma4"),
    (("<|inner_prefix|>",), "apertus"),
    (("<think>", "<response>", "</response>"), "ernie45"),
    (("</think>", "<answer>", "<|extra_0|>"), "hunyuan_a13b"),
    (("</think>", "<answer>", "<｜hy_"), "hunyuan_a13b"),
    (("Here is my thought process:",), "granite"),
    (("◁think▷",), ""),
    (("<think>",), "think"),
    (("</think>",), "think"),
)
_PROMPT_PART = re.compile(r"add_generation_prompt")


def call_format_names() -> list[str]:
    """What --tool-call-parser takes."""
    return [AUTO, NONE, *sorted({*CALL_FORMATS, *CALL_ALIASES})]


def thinking_names() -> list[str]:
    """What --reasoning-parser takes."""
    return [AUTO, NONE, *sorted({*THINKING, *THINKING_ALIASES})]


def find_format(template: str | Mapping[str, str] | None, calls: str = AUTO, thinking: str = AUTO) -> MessageFormat:
    """The format, found by the template or by the given names."""
    text = "\n".join(template.values()) if isinstance(template, Mapping) else template or ""
    return MessageFormat(_thinking(text, thinking), _calls(text, calls))


def _calls(text: str, name: str) -> CallFormat | None:
    if name == NONE:
        return None
    if name != AUTO:
        found = CALL_FORMATS.get(CALL_ALIASES.get(name, name))
        if found is None:
            raise ParameterError(
                f"There is no tool-call parser {name!r}; there are {', '.join(call_format_names())}.",
                param="tool_call_parser",
            )
        return found
    # Templates write a quotation mark or a line end as an escape now and then.
    plain = text.replace("\\n", "\n").replace('\\"', '"')
    return next((CALL_FORMATS[f] for marks, f in _CALL_MARKS if all(m in plain for m in marks)), None)


def _thinking(text: str, name: str) -> Thinking | None:
    if name == NONE:
        return None
    if name != AUTO:
        found = THINKING.get(THINKING_ALIASES.get(name, name))
        if found is None:
            raise ParameterError(
                f"There is no reasoning parser {name!r}; there are {', '.join(thinking_names())}.",
                param="reasoning_parser",
            )
        return found
    chosen = next((f for marks, f in _THINKING_MARKS if all(mark in text for mark in marks)), "")
    return THINKING.get(chosen)


def thinks_by_itself(template: str | Mapping[str, str] | None, thinking: Thinking | None) -> bool:
    """May the model begin reasoning by itself? Not if the template opens the reasoning."""
    if thinking is None:
        return False
    text = "\n".join(template.values()) if isinstance(template, Mapping) else template or ""
    places = [found.end() for found in _PROMPT_PART.finditer(text)]
    tail = text[places[-1] :] if places else ""
    opened, closed = tail.rfind(thinking.open.strip()), tail.rfind(thinking.close.strip())
    return not (opened >= 0 and closed < opened)


def opens_thinking(prompt: str, thinking: Thinking | None, continued: str = "") -> bool:
    """Does the prompt end inside reasoning? `continued`: the text at its end that the answer continues."""
    if thinking is None:
        return False
    opened, close = thinking.open.strip(), thinking.close.strip()
    return prompt.rstrip().endswith(opened) or continued.rfind(opened) > continued.rfind(close)


def closed_thinking(prompt: str, thinking: Thinking | None) -> bool:
    """Does the prompt end with closed reasoning (an empty one, which switches it off)?"""
    return thinking is not None and prompt.rstrip().endswith(thinking.close.strip())
