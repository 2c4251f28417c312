"""Where the demo model's files are, and how its parts are named."""

from __future__ import annotations

import pathlib

from tokenmill.core.errors import UserError

PARTS = ("draft", "medusa", "moe")
"""Models that come with the demo: the small one and the heads that guess for it, and one with experts."""
ADAPTERS = ("pirate", "sql")


def demo_dir(part: str = "main") -> pathlib.Path:
    """The folder of one part of the demo family: main, draft, ..."""
    return pathlib.Path(__file__).parent / part


def demo_model(name: str) -> pathlib.Path | None:
    """The folder that `demo`, `demo:draft`, ... name; None: the name is none of these."""
    if name in ("demo", "demo:latest"):  # as Ollama's clients call it
        return demo_dir("main")
    part = name.removeprefix("demo:")
    return demo_dir(part) if part != name and part in PARTS and not pathlib.Path(name).exists() else None


def check_part(name: str) -> None:
    """Refuse a name that looks like a part of the demo and is none."""
    if name.startswith("demo:") and demo_model(name) is None and not pathlib.Path(name).exists():
        part = name.removeprefix("demo:")
        if part in ADAPTERS:
            raise UserError(
                f"{name} is an adapter: `tokenmill serve demo --enable-lora --lora-modules {part}={name}` serves it, "
                f"`tokenmill merge demo {name} FOLDER` makes a model of it."
            )
        parts, others = (", ".join(f"demo:{one}" for one in names) for names in (PARTS, ADAPTERS))
        raise UserError(f"The demo has no part {name!r}: there are {parts}, and adapters {others}.")
