"""Names of stored models, however a client writes them. Owns: that capitals, `hf.co/` and `:latest` make no difference
to these names, as in the store. Must not know: HTTP, what is stored.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenmill.checkpoint.stored_names import LATEST, without_hub


def with_and_without_tag(name: str) -> tuple[str, str]:
    """The two spellings that Ollama's clients take for one name."""
    bare = name.removesuffix(f":{LATEST}")
    return bare, f"{bare}:{LATEST}"


class Spellings:
    """The served names of stored models."""

    def __init__(self) -> None:
        self._served: dict[str, str] = {}

    def add(self, names: Iterable[str]) -> None:
        """From now on each of these has many spellings."""
        self._served |= {_plain(name): name for name in names}

    def remove(self, names: Iterable[str]) -> None:
        """These are no longer served."""
        for name in names:
            self._served.pop(_plain(name), None)

    def of(self, name: str) -> tuple[str, ...]:
        """What a client may mean by a name, the likeliest first: it, it without Ollama's tag, a stored model's name."""
        return name, name.removesuffix(f":{LATEST}"), self._served.get(_plain(name), name)


def _plain(name: str) -> str:
    return without_hub(name).lower().removesuffix(f":{LATEST}")
