"""Making stored models: from a Modelfile, or from what a client says. Owns: what FROM and ADAPTER may name, what is
taken over from the model that they name, and Modelfiles of stored models.

Must not know: HTTP, terminals, how the store keeps things.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.checkpoint.beginnings import check_adapter
from tokenmill.checkpoint.blobs import check_files
from tokenmill.checkpoint.entry import Entry, Source
from tokenmill.checkpoint.gguf_file import open_gguf
from tokenmill.checkpoint.hub import Hub
from tokenmill.checkpoint.modelfile import Modelfile, ModelfileError, write_modelfile
from tokenmill.checkpoint.modelfile_parameters import check_parameters, read_written, written
from tokenmill.checkpoint.pull import Progress, Tell, describe_source, measured, pull_hub
from tokenmill.checkpoint.store import Store
from tokenmill.checkpoint.stored import DEMO, as_stored, location, rank_of
from tokenmill.checkpoint.stored_names import LATEST, full_name, may_be_name
from tokenmill.core.config import make_config
from tokenmill.core.errors import ParameterError, UserError
from tokenmill.demo import demo_dir
from tokenmill.measure.adapter_fit import check_fit
from tokenmill.server.ollama.stated_context import check_context
from tokenmill.text.chat_template import check_template
from tokenmill.text.codec import Tokenizer
from tokenmill.text.gguf import tokenizer_from_gguf
from tokenmill.text.go_template import literal, to_jinja
from tokenmill.text.tokenizer import load_tokenizer

MOST_WORDS = 1 << 20
"""Most characters of a system message, a template, a license or a message."""
MOST_MESSAGES = 1024


@dataclass(slots=True)
class ModelRecipe:
    """What a model is made of. None: as in the model from which it is made."""

    name: str
    base: str = ""
    files: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    system: str | None = None
    template: str | None = None
    adapter: str = ""
    adapter_files: dict[str, str] = field(default_factory=dict)
    license: list[str] = field(default_factory=list)
    messages: list[dict[str, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Reach:
    """What FROM and ADAPTER may name. find: the path on this machine that the words name, if it may be used."""

    find: Callable[[str], Path | None]
    hub: Hub | None = None
    revision: str | None = None


def from_modelfile(name: str, said: Modelfile) -> ModelRecipe:
    """The recipe that a Modelfile describes."""
    if len(said.adapters) > 1:
        raise ModelfileError("a model has one ADAPTER here; `serve --lora-modules` serves several at once.")
    messages = [{"role": role, "content": content} for role, content in said.messages]
    return ModelRecipe(
        name,
        said.base,
        parameters=read_written(said.parameters),
        system=said.system,
        template=said.template,
        adapter=said.adapters[0] if said.adapters else "",
        license=said.license,
        messages=messages,
    )


def create(store: Store, recipe: ModelRecipe, reach: Reach, tell: Tell) -> Entry:
    """Store the model. A UserError says what cannot be used."""
    full = full_name(recipe.name)
    _check_free(full, "model")
    for what, texts in (("system", [recipe.system]), ("template", [recipe.template]), ("license", recipe.license)):
        if any(text is not None and len(text) > MOST_WORDS for text in texts):
            raise ParameterError(f"{what} has more than {MOST_WORDS} characters.", param=what)
    if len(recipe.messages) > MOST_MESSAGES:
        raise ParameterError(f"there are more than {MOST_MESSAGES} messages.", param="messages")
    parameters = check_parameters(recipe.parameters)
    if recipe.template:
        check_template(to_jinja_or_own(recipe.template), "TEMPLATE", "template")  # before anything is downloaded
    base = _base(store, recipe, reach, tell)
    check_context(Path(location(store, base.source)[0]), {**base.parameters, **parameters})
    adapter = _adapter(store, recipe, reach)
    if adapter is not None:
        options = as_stored(store, Entry(full, base.source, base.parameters, adapter=adapter)).options
        check_fit(make_config(**options), Path(location(store, adapter)[0]))
    adapter = adapter or base.adapter
    words = base.words
    if recipe.template is not None:
        jinja = _framed(store, base.source, recipe.template) if recipe.template else ""
        words = msgspec.structs.replace(words, template=jinja, written=recipe.template)
    if recipe.system is not None:
        words = msgspec.structs.replace(words, system=recipe.system)
    words = msgspec.structs.replace(
        words, messages=recipe.messages or words.messages, license=recipe.license or words.license
    )
    for digest in sorted(base.blobs):
        tell(Progress(f"using existing layer {digest}"))
    tell(Progress("writing manifest"))
    made = Entry(
        full,
        base.source,
        {**base.parameters, **parameters},
        words,
        adapter,
        parent=recipe.base[:200],
        size=base.size,
        format=base.format,
    )
    return store.put(made)


def known_entry(store: Store, name: str) -> Entry:
    """The stored model of this name, or the demonstration model. A NoSuchModelError says that there is none."""
    if not is_demo(name):
        return store.get(name)
    path = demo_dir("main")
    form, size = measured(path)
    return Entry(f"{DEMO}:{LATEST}", Source("path", path=str(path.absolute())), size=size, format=form)


def copy_model(store: Store, source: str, target: str) -> Entry:
    """Store the same model under another name, which must not be the demonstration model's."""
    full = full_name(target, "destination")
    _check_free(full, "destination")
    if not is_demo(source):
        return store.copy(source, full)
    return store.put(msgspec.structs.replace(known_entry(store, source), name=full))


def is_demo(name: str) -> bool:
    """Is this the name of the demonstration model?"""
    return full_name(name).lower() == f"{DEMO}:{LATEST}"


def _check_free(full: str, param: str) -> None:
    if is_demo(full):
        raise ParameterError("`demo` is the model that comes with this program: choose another name.", param=param)


def to_jinja_or_own(template: str) -> str:
    """A Go template as Jinja. A Jinja template stays as it is."""
    return template if "{%" in template else to_jinja(template)


def modelfile_of(entry: Entry) -> str:
    """A Modelfile from which the model could be made again."""
    words = entry.words
    modelfile = Modelfile(
        base=DEMO if is_demo(entry.name) else describe_source(entry),
        parameters=written(entry.parameters),
        system=words.system or None,
        template=words.written or None,
        adapters=[_of_source(entry.adapter)] if entry.adapter is not None else [],
        license=words.license,
        messages=[(m["role"], m["content"]) for m in words.messages],
    )
    try:
        return write_modelfile(modelfile)
    except ModelfileError as error:
        return f"# {error}\nFROM {modelfile.base}\n"


def _of_source(source: Source) -> str:
    return source.path or ", ".join(sorted(source.files))


def _base(store: Store, recipe: ModelRecipe, reach: Reach, tell: Tell) -> Entry:
    """The model from which the new one is made. Nothing is stored under the new name yet."""
    if recipe.files:
        if recipe.base:
            raise ParameterError("Give from or files, not both.", param="files")
        source = Source("files", files=check_files(recipe.files))
        _check_there(store, source)
        form, size = measured(Path(location(store, source)[0]))
        return Entry("-", source, size=size, format=form)
    if not recipe.base:
        raise ParameterError("from is missing: the name, folder or file of the model to start from.", param="from")
    path = demo_dir("main") if may_be_name(recipe.base) and is_demo(recipe.base) else reach.find(recipe.base)
    if path is not None:
        form, size = measured(path)
        return Entry("-", Source("path", path=str(path.absolute())), size=size, format=form)
    found = store.find(recipe.base)
    if found is not None:
        return found
    if not may_be_name(recipe.base) or "/" not in recipe.base:
        raise UserError(
            f"FROM {ascii(recipe.base)[:80]}: this is neither a stored model nor a folder or .gguf file that may be "
            "used here nor a hub name (OWNER/NAME)."
        )
    return pull_hub(store, recipe.base, reach.revision, reach.hub or Hub(), tell)


def _adapter(store: Store, recipe: ModelRecipe, reach: Reach) -> Source | None:
    """The adapter, if the recipe names one."""
    if recipe.adapter_files:
        source = Source("files", files=check_files(recipe.adapter_files, "adapters"))
        _check_there(store, source)
    elif recipe.adapter:
        path = reach.find(recipe.adapter)
        if path is None:
            raise UserError(f"ADAPTER {ascii(recipe.adapter)[:80]}: there is no such folder or file that may be used.")
        source = Source("path", path=str(path.absolute()))
    else:
        return None
    where = Path(location(store, source)[0])
    if not rank_of(where):
        raise UserError("ADAPTER names neither a PEFT folder (adapter_config.json) nor a GGUF adapter.")
    check_adapter(where)
    return source


def _check_there(store: Store, source: Source) -> None:
    for name, digest in source.files.items():
        if not store.blob(digest).is_file():
            raise ParameterError(
                f"there is no file {digest} here for {name}: send it first (POST /api/blobs/{digest}).", param="files"
            )


def _framed(store: Store, source: Source, template: str) -> str:
    """The template in Jinja. It begins as every prompt of this model does: Ollama's program adds these tokens
    itself."""
    jinja = to_jinja_or_own(template)
    if jinja is template:
        return jinja
    where, _ = location(store, source)
    tokenizer = _tokenizer(Path(where))
    begins = "".join(tokenizer.id_to_token(token) or "" for token in tokenizer.frame[0])
    return jinja if not begins or template.startswith(begins) else f"{{{{ {literal(begins)} }}}}{jinja}"


def _tokenizer(path: Path) -> Tokenizer:
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if not files or (path / "tokenizer.json").exists():
            return load_tokenizer(path)
        path = files[0]
    return tokenizer_from_gguf(open_gguf(path).metadata, str(path))
