"""The helper process that renders chat templates. Owns: the jinja2 sandbox, its functions, and shaping messages for a
template. A template may loop for ever, or fill the memory, inside one native call; only a process can then be stopped.
Must not know: who asks, fences, tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NamedTuple

from tokenmill.process.worker import Answer, HelperTask, Unusable, serve

Message = dict[str, Any]
_END = "\ufdd1"  # a code point that is never text; it marks the end of an unfinished last message
TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Types of content parts that are text, and the field that holds it."""
_REASONING = ("reasoning_content", "reasoning", "thinking")


class RefusedByTemplate(Exception):
    """The messages do not fit the template. The text is for the person who sent them."""


def prepare(setup: dict[str, Any]) -> Answer:
    """The answering function of a model's templates; compiling runs parts of them (constant folding)."""
    try:
        templates = {name: Compiled(source) for name, source in setup["sources"].items()}
    except Exception as error:
        raise Unusable(f"the chat template cannot be compiled: {_words(error)}") from error

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"text": templates[request["template"]].render(request, setup["max_chars"])}
        except RefusedByTemplate as error:
            return {"error": str(error)}
        except MemoryError:
            return {"error": "the chat template needs too much memory"}
        except Exception as error:
            return {"error": f"the chat template refused the messages: {_words(error)}"}

    return answer


def _words(error: Exception) -> str:
    line = getattr(error, "lineno", None)
    if isinstance(error, OSError):  # its text would name a file of this machine
        text = "it needs a file, and none may be opened here"
    else:
        text = (str(error) or type(error).__name__)[:500]
    return f"{text} (line {line})" if line else text


class Compiled:
    """One template, ready to render."""

    def __init__(self, source: str) -> None:
        environment = _environment()
        self._shape = content_shape(environment.parse(source))
        self._template = environment.from_string(source)

    def render(self, request: dict[str, Any], max_chars: int) -> str:
        """The prompt text for a request's messages and variables."""
        messages = [shaped(message, self._shape) for message in request["messages"]]
        if request["continue"]:
            _mark_end(messages)
        chunks, size = [], 0
        for chunk in self._template.generate(messages=messages, **request["variables"]):
            chunks.append(chunk)
            size += len(chunk)
            if size > max_chars:
                raise RefusedByTemplate(f"the rendered chat is over the limit of {max_chars} characters")
        text = "".join(chunks)
        return _cut_at_end(text) if request["continue"] else text


class ContentShape(NamedTuple):
    """What a template expects of a message's content."""

    parts: bool  # the template loops over content parts
    wraps: bool  # it never asks whether content is text, so text must come as a part
    nulls: bool  # it tells a turn of calls by a content that is null; others take its text, which is then empty
    writes: bool  # it writes a call's arguments as they are, so they must be JSON text instead of an object


def shaped(message: Message, shape: ContentShape) -> Message:
    """A message as the template expects it: content as text or as parts, tool arguments as objects."""
    content = message.get("content")
    # The API sends null for what is absent; most templates only look whether the key is there.
    message = {key: value for key, value in message.items() if value is not None}
    if message.get("tool_calls") and not content:
        content = message["content"] = None if shape.nulls else ""
    elif shape.nulls:
        message.setdefault("content", content)
    # Templates that read a user's parts mostly add what a tool said to a text.
    result = message.get("role") in ("tool", "function") and not shape.wraps
    if isinstance(content, list) and (not shape.parts or (result and all(map(_is_text, content)))):
        message["content"] = "\n".join(map(_part_text, content))
    elif isinstance(content, list):
        message["content"] = Parts(map(_plain_part, content))
    elif isinstance(content, str) and shape.parts and shape.wraps:
        message["content"] = [{"type": "text", "text": content}]
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    if isinstance(message.get("tool_calls"), list):
        message["tool_calls"] = [_parsed_call(call, shape.writes) for call in message["tool_calls"]]
    return message


class Parts(list[object]):
    """Parts for a template that loops over them. Many do so for some messages and write the content of others as it is;
    those get the text of the parts, not the list as Python shows it."""

    def __str__(self) -> str:
        return "\n".join(map(_part_text, self))

    def __getattr__(self, name: str) -> Any:
        return getattr(str(self), name)

    def __contains__(self, item: object) -> bool:
        return item in str(self) if isinstance(item, str) else super().__contains__(item)

    def __add__(self, other: Any) -> Any:
        return str(self) + other if isinstance(other, str) else [*self, *other]

    def __radd__(self, other: Any) -> Any:
        return other + str(self) if isinstance(other, str) else [*other, *self]


def _is_text(part: object) -> bool:
    kind = part.get("type", "text") if isinstance(part, dict) else None
    return isinstance(part, str) or (isinstance(kind, str) and isinstance(part, dict) and kind in TEXT_PARTS)


def _part_text(part: object) -> str:
    if isinstance(part, str):
        return part
    kind = str(part.get("type", "text")) if isinstance(part, dict) else type(part).__name__
    text = part.get(TEXT_PARTS.get(kind, "")) if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise RefusedByTemplate(f"this model's chat template takes text only, not a content part of type {kind!r}")
    return text


def _plain_part(part: object) -> object:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, dict) and part.get("type") in ("input_text", "output_text"):
        return {**part, "type": "text"}
    return part


def _parsed_call(call: object, written: bool) -> object:
    """The call with its arguments as an object, or as JSON text. The API sends text, and other APIs objects."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = arguments or "{}"
        if not written:
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                return call
            if not isinstance(arguments, dict):
                return call
    elif isinstance(arguments, dict) and written:
        arguments = _to_json(arguments)
    return {**call, "function": {**function, "arguments": arguments}} if "arguments" in function else call


def _mark_end(messages: list[Message]) -> None:
    content = messages[-1].get("content") if messages else None
    parts = content if isinstance(content, list) else []
    texts = [part for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    # The space tells a template that trims the content from one that keeps it.
    if isinstance(content, str) and (content or not messages[-1].get("tool_calls")):
        messages[-1]["content"] = f"{content}{_END} "
    elif texts:
        texts[-1]["text"] = f"{texts[-1]['text']}{_END} "
    else:
        raise RefusedByTemplate("continue_final_message needs a last message with text to continue")


def _cut_at_end(text: str) -> str:
    at = text.rfind(_END)
    if at < 0:
        raise RefusedByTemplate("the chat template drops the last message, so continue_final_message cannot work")
    return text[:at] if text[at + 1 : at + 2] == " " else text[:at].rstrip()


def _environment() -> Any:
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """`{% generation %}` marks assistant text for training; here its body is simply part of the prompt."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    class PublicNamespace(Namespace):
        def __setitem__(self, name: str, value: object) -> None:
            if name.startswith("_"):
                raise jinja2.exceptions.SecurityError("namespace names must not begin with an underscore")
            super().__setitem__(name, value)

    def raise_exception(message: object) -> None:
        raise jinja2.exceptions.TemplateError(str(message))

    def new_dict(*args: Any, **entries: Any) -> dict[Any, Any]:
        return dict(*args, **entries)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.pop("lipsum")
    environment.globals.update(
        raise_exception=raise_exception, strftime_now=_now, dict=new_dict, namespace=PublicNamespace
    )
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def content_shape(tree: Any) -> ContentShape:
    """Read from a parsed template what it expects of `content` and of a call's `arguments`."""
    from jinja2 import nodes

    is_content = _named(tree, "content")
    loops = any(is_content(loop.iter) for loop in tree.find_all(nodes.For))
    tests = {test.name for test in tree.find_all(nodes.Test)}
    asks = not tests.isdisjoint(("string", "iterable", "sequence", "mapping"))
    null = any(test.name == "none" and is_content(test.node) for test in tree.find_all(nodes.Test))
    same = any(is_content(one.expr) and "" in map(_constant, one.ops) for one in tree.find_all(nodes.Compare))
    return ContentShape(loops, not asks, null and not same, _writes_arguments(tree))


def _constant(operand: Any) -> object:
    return getattr(operand.expr, "value", None)


def _named(tree: Any, key: str) -> Callable[[Any], bool]:
    """Tells which nodes of a template are the value under this key, filtered or not, or a variable that was set to
    it."""
    from jinja2 import nodes

    aliases = {key}

    def is_it(node: Any) -> bool:
        if isinstance(node, nodes.Filter):
            return node.node is not None and is_it(node.node)
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == key
        if isinstance(node, nodes.Getattr):
            return bool(node.attr == key)
        return isinstance(node, nodes.Name) and node.name in aliases

    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and is_it(assign.node):
            aliases.add(assign.target.name)
    return is_it


def _writes_arguments(tree: Any) -> bool:
    """Does a template join a call's arguments to text, and never ask what they are, nor look into them?"""
    from jinja2 import nodes

    is_it = _named(tree, "arguments")
    inside = (nodes.Filter, nodes.Test, nodes.Getattr, nodes.Getitem)
    if any(is_it(node.node) for node in tree.find_all(inside) if node.node is not None):
        return False
    if any(is_it(loop.iter) for loop in tree.find_all(nodes.For)):
        return False
    joined = [(node.left, node.right) for node in tree.find_all(nodes.Add)]
    joined += [tuple(node.nodes) for node in tree.find_all((nodes.Concat, nodes.Output))]
    return any(is_it(part) for parts in joined for part in parts)


def _warm() -> None:
    """Do everything that opens files once, because the fence forbids it afterwards."""
    _now("%d %b %Y %A")
    probe = "{{ {'a': [1]}|tojson(indent=2) }}{% for x in [1] %}{% generation %}{{ x }}{% endgeneration %}{% endfor %}"
    # These filters import their modules when they are used.
    late = "{{ 'a b'|wordwrap(1) }}{{ [1]|pprint }}{{ '&'|striptags }}"
    list(_environment().from_string(probe + late).generate())
    for broken in ("{{ raise_exception('x') }}", "{{ undefined.name.name }}", "{{ 'x'.__class__.__mro__ }}"):
        try:
            list(_environment().from_string(broken).generate())
        except Exception as error:
            _words(error)


def run_helper() -> None:
    """Run as a helper process, without new files or sockets."""
    serve(HelperTask(prepare, warm=_warm, files=3))
