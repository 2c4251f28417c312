"""Names of stored models: `mill`, `mill:small`, `owner/model:Q4_K_M`. Owns: which names are valid, and a name's file.

Names are plain ASCII, so no two names look alike and no name leads out of the store's folder. Must not know: what is
stored.
"""

from __future__ import annotations

import re

from tokenmill.core.errors import ParameterError

LATEST = "latest"
HUBS = ("hf.co/", "huggingface.co/")
MOST = 200
_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_-])?"
_NAME = re.compile(rf"({_PART}(?:/{_PART})?)(?::({_PART}))?", re.ASCII)


def full_name(given: object, param: str = "model") -> str:
    """The name with its tag: `mill` is `mill:latest`, `hf.co/owner/model` is `owner/model:latest`. Invalid names are
    refused."""
    found = _NAME.fullmatch(without_hub(given)) if isinstance(given, str) and len(given) <= MOST else None
    if found is None or ".." in found[0]:
        raise ParameterError(
            "a model's name is NAME, NAME:TAG or OWNER/NAME:TAG of letters, digits and ._- (each part begins with a "
            f"letter or digit and has at most 96 of them), not {_shown(given)}.",
            param=param,
        )
    return f"{found[1]}:{found[2] or LATEST}"


def may_be_name(given: str) -> bool:
    """Could this be the name of a stored model?"""
    found = _NAME.fullmatch(without_hub(given)) if len(given) <= MOST else None
    return found is not None and ".." not in given


def short_name(name: str) -> str:
    """The name as people write it: without the default tag."""
    return name.removesuffix(f":{LATEST}")


def without_hub(name: str) -> str:
    """`hf.co/owner/model` is `owner/model`: only one hub is known."""
    return next((name[len(hub) :] for hub in HUBS if name.lower().startswith(hub)), name)


def file_name(name: str) -> str:
    """The file name for a full name. Names that differ only in case share it, on every file system."""
    return name.lower().replace("/", "+").replace(":", "@") + ".json"


def name_from(path_name: str) -> str:
    """A valid name made from the name of a file or folder."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", path_name.removesuffix(".gguf"))
    return re.sub(r"\.{2,}", ".", plain).strip("._-")[:96].rstrip("._-") or "model"


def _shown(given: object) -> str:
    text = ascii(given)
    return text if len(text) <= 80 else text[:77] + "..."
