"""What can be seen of a model before it is loaded. Owns: whether there can be a model of this name, and whether it has
a chat template. So a mistake is reported at once, and not after an engine's imports.

It reads only headers and small files on this machine; a hub model that is not here yet is left to the load.
Must not know: torch, engines.
"""

from __future__ import annotations

import re
from pathlib import Path

from tokenmill.checkpoint.gguf_file import open_gguf
from tokenmill.checkpoint.hub import check_place
from tokenmill.checkpoint.no_model import check_folder, check_gguf, no_model
from tokenmill.checkpoint.stored import find_stored
from tokenmill.checkpoint.stored_names import without_hub
from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import ModelError, UserError
from tokenmill.core.files import in_home, read_object
from tokenmill.demo import check_part, demo_model

_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
_KEY = "tokenizer.chat_template"
MOST_CONFIG_BYTES = 4 << 20


def plain_name(name: str) -> str:
    """The model's name. The address of its page at the hub counts as one."""
    page = re.sub("^https?://", "", name)
    return without_hub(page) if page != name and without_hub(page) != page else name


def look_for(name: str) -> None:
    """Refuse a name that can be neither a path nor a hub's name, a folder without config.json, and a file that is not a
    GGUF file."""
    path = _place(name)
    if not path.exists():
        if name.isdigit():
            raise UserError(f"{name} is not a model's name; did you mean --port {name}?")
        if re.match("https?://", name):
            raise UserError(
                f"{name} is an address, not a model. A running server is asked on its web page or by a client of its "
                "API; this verb loads a model itself."
            )
        check_part(name)
        check_place(name)
    elif path.is_dir():
        if any(path.glob("*.safetensors")) or not any(path.glob("*.gguf")):
            check_folder(path)
            read_object(path / "config.json", MOST_CONFIG_BYTES)
    elif path.suffix == ".gguf":
        check_gguf(open_gguf(path), path)
    else:
        raise no_model(path)


def look_for_one_of_several(name: str) -> None:
    """Refuse a single word that names nothing here. It is more likely a typing error than one of the hub's few models
    without an owner, and the error would otherwise appear only when a request asks for the model."""
    if demo_model(name) is not None or "/" in name or _place(name).exists() or find_stored(name) is not None:
        return
    raise UserError(
        f"{name} is not a folder, file or stored model here, and a model on the hub is OWNER/MODEL. `serve` takes "
        "models, one or several, and flags."
    )


def lacks_template(config: EngineConfig) -> bool:
    """Is it certain that this model has no chat template?"""
    path = _place(config.model.tokenizer or config.model.model)
    if not path.exists():
        return False
    try:
        return not _has_template(path)
    except (ModelError, OSError):
        return False  # the load says what is wrong with it


def _place(name: str) -> Path:
    return demo_model(name) or in_home(name)


def _has_template(path: Path) -> bool:
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if not any(path.glob("*.safetensors")) and files:
            return _has_template(files[0])
        settings = path / "tokenizer_config.json"
        named = settings.is_file() and '"chat_template"' in settings.read_text(encoding="utf-8", errors="replace")
        return named or any((path / file).exists() for file in _TEMPLATES)
    if path.suffix != ".gguf":
        return True
    return any(key == _KEY or key.startswith(_KEY + ".") for key in open_gguf(path).metadata)
