"""What --help prints. Owns: which flags are common, and the layout: whole names, groups, text wrapped to the terminal.

An option that is not listed here as common is shown only by --help-all. Flags that a verb declares itself are always
shown. Must not know: verbs, what options do.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import typer

from tokenmill.core.config import GROUPS, SERVER_GROUPS, all_options

ALL = "--help-all"
COMMON = frozenset(
    {
        *("model", "dtype", "quantization", "max_model_len", "served_model_name", "seed", "device", "threads"),
        *("kv_cache_dtype", "kv_cache_memory_bytes", "gpu_memory_utilization", "enable_prefix_caching"),
        *("max_num_seqs", "speculative_config", "host", "port", "api_key", "allowed_origins", "engines"),
        *("chat_template", "tool_call_parser", "reasoning_parser", "request_timeout", "log_level", "log_json"),
    }
)
LEFT, NARROW, WIDEST = 30, 56, 110
"""The columns for flags; with fewer columns in all than NARROW, explanations stand below the flags; lines never get
longer than WIDEST."""
_KINDS = {int: "N", float: "X", str: "TEXT", Path: "FILE"}
Rows = list[tuple[str, str]]


def rare(param: Any) -> bool:
    """Is this flag shown only by --help-all?"""
    name = param.name.removesuffix("_option")
    return name not in COMMON and (name in all_options(GROUPS) or name in all_options(SERVER_GROUPS))


def page(usage: str, text: str, params: Iterable[Any], *, everything: bool) -> str:
    """The help of a verb."""
    width = max(20, min(WIDEST, shutil.get_terminal_size().columns - 1))
    parts = [usage, _wrapped(text, width)]
    groups: dict[str, Rows] = {"Arguments": [], "Options": []}
    left_out = 0
    for param in params:
        if param.param_type_name == "argument":
            groups["Arguments"].append((_argument(param), _explained(param)))
        elif getattr(param, "hidden", False):
            continue
        elif rare(param) and not everything:
            left_out += 1
        else:
            panel = getattr(param, "rich_help_panel", None) or "Options"
            groups.setdefault(panel, []).append((flags(param), _explained(param)))
    if left_out:
        groups["Options"].append((ALL, f"Show {left_out} more flags, which few people need."))
    parts += [section(title, rows, width) for title, rows in groups.items() if rows]
    return "\n\n".join(part for part in parts if part)


def section(title: str, rows: Sequence[tuple[str, str]], width: int) -> str:
    """A heading and its entries. Names are never cut."""
    column = min(LEFT, max(len(name) for name, _ in rows)) + 4
    below = width < NARROW
    lines = [typer.style(f"{title}:", bold=True)]
    for name, text in rows:
        indent = 6 if below else column
        wrapped_lines = textwrap.wrap(
            text, max(14, width - indent), break_long_words=False, break_on_hyphens=False
        ) or [""]
        head = f"  {name}"
        if not below and len(head) + 2 <= column:
            lines.append(f"{head:{column}}{wrapped_lines.pop(0)}".rstrip())
        else:
            lines += _broken(head, width)
        lines += [" " * indent + line for line in wrapped_lines if line]
    return "\n".join(lines)


def _broken(head: str, width: int) -> list[str]:
    """A flag with its values in as many lines as it needs, each broken behind a `|`."""
    lines = [""]
    for value in re.split(r"(?<=\|)", head):
        if lines[-1] and len(lines[-1]) + len(value) > width:
            lines.append(" " * 6)
        lines[-1] += value
    return lines


def verbs_page(usage: str, text: str, verbs: Rows, flags: Rows) -> str:
    """The help of a group of verbs."""
    width = max(20, min(WIDEST, shutil.get_terminal_size().columns - 1))
    return "\n\n".join([usage, _wrapped(text, width), section("Verbs", verbs, width), section("Options", flags, width)])


def flags(param: Any) -> str:
    """All names of a flag and its value: `-p, --prompt TEXT`, `--[no-]stream`."""
    off = {name.removeprefix("--no-") for name in param.secondary_opts}
    names = [f"--[no-]{name[2:]}" if name[2:] in off else name for name in sorted(param.opts, key=_is_long)]
    other = [name for name in param.secondary_opts if not name.startswith("--no-")]
    return f"{', '.join([*names, *other])} {placeholder(param)}".rstrip()


def _is_long(name: str) -> bool:
    return name.startswith("--")


def _argument(param: Any) -> str:
    name = f"{param.metavar or str(param.name).upper()}{'...' if param.nargs == -1 else ''}"
    return name if param.required else f"[{name}]"


def _explained(param: Any) -> str:
    """What the parameter's help says, and its default, unless the help says that or it asks for nothing."""
    text, default = str(param.help or ""), param.default
    if param.param_type_name == "option" and param.required:
        return f"{text} (required)"
    given = type(default) in (int, float) or (isinstance(default, str) and default)
    return f"{text} (default: {default})" if given and "default" not in text else text


def placeholder(param: Any) -> str:
    """What stands for the value: N for whole numbers, nothing for switches."""
    if param.metavar:
        return str(param.metavar)
    if getattr(param, "is_flag", False):
        return ""
    descriptor = getattr(param, "type_descriptor", None)
    choices = getattr(descriptor, "choices", None) or getattr(getattr(param, "type", None), "choices", None)
    if choices:
        return "|".join(map(str, choices))
    kind: Any = getattr(descriptor, "annotation", None)
    kind = (getattr(kind, "__args__", None) or (kind,))[0]
    name = getattr(getattr(param, "type", None), "name", "")
    old = {"integer": "N", "integer range": "N", "float": "X", "float range": "X", "path": "FILE"}
    return _KINDS.get(kind) or old.get(name, "TEXT")


def _wrapped(text: str, width: int) -> str:
    """Paragraphs, each wrapped to this width."""
    paragraphs = [" ".join(part.split()) for part in text.strip().split("\n\n")]
    return "\n\n".join(textwrap.fill(part, width, break_on_hyphens=False) for part in paragraphs if part)
