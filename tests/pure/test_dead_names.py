"""What nothing calls is no part of the program: every function, method and class of src has a use, or a reason."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "bench", "train", "examples", "tools")
KEPT = {
    "names of vLLM's LLM and its engines": "from_optional check_health add_lora remove_lora list_loras "
    "get_num_unfinished_requests is_running",
    "names of Transformers' tokenizers": "convert_ids_to_tokens convert_tokens_to_string get_added_vocab max_token_id "
    "all_special_tokens get_chat_template",
    "asyncio calls them": "eof_received data_received pause_writing resume_writing",
    "uvicorn's queue": "appendleft",
    "typer calls it": "format_help",
    "urllib calls it": "redirect_request",
    "torch calls them": "_should_skip_dynamo get_current_device get_current_stream",
    "tests of plug-ins use it": "HashRanks",
}
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def defined() -> Counter[str]:
    """Names and how often each is defined."""
    nodes = (node for file in (ROOT / "src").rglob("*.py") for node in ast.walk(ast.parse(file.read_text())))
    return Counter(node.name for node in nodes if isinstance(node, DEFINITIONS) and not node.name.startswith("__"))


def written() -> Counter[str]:
    """Words of all programs."""
    kinds = {".py", ".js", ".html", ".toml", ".cpp", ".h", ".inl"}
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.suffix in kinds]
    return Counter(word for file in files for word in re.findall(r"\w+", file.read_text(errors="ignore")))


def test_whatever_is_defined_is_used() -> None:
    words = written()
    dead = {name for name, times in defined().items() if words[name] <= times}
    kept = {name for names in KEPT.values() for name in names.split()}
    assert dead - kept == set(), "nothing uses these: take them out, or give a reason"
    assert kept - dead == set(), "these are used, or are gone: they need no reason"
