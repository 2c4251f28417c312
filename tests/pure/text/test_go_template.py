"""Go templates of Ollama's models as Jinja: the same prompts, or a refusal that names what has no counterpart.

`ollama` below makes prompts as that program does, from the parts of a turn; expected texts are written out by hand.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.text.go_template import MOST_CHARS, TemplateError, to_jinja
from tokenmill.text.template_worker import prepare

CHATML = (
    "{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n{{ end }}"
    "{{ if .Prompt }}<|im_start|>user\n{{ .Prompt }}<|im_end|>\n{{ end }}"
    "<|im_start|>assistant\n{{ .Response }}<|im_end|>\n"
)
MESSAGES = """{{- range $i, $_ := .Messages }}
{{- $last := eq (len (slice $.Messages $i)) 1 -}}
<|{{ .Role }}|>
{{ .Content }}<|end|>
{{- if and $last (ne .Role "assistant") }}
<|assistant|>
{{ end }}
{{- end }}"""


def render(template: str, messages: list[dict[str, Any]], *, cut: bool = False) -> str:
    answer = prepare({"sources": {"default": to_jinja(template)}, "max_chars": 1 << 20})
    asked = {"template": "default", "messages": messages, "variables": {"add_generation_prompt": True}, "continue": cut}
    found = answer(asked)
    assert "text" in found, found
    return str(found["text"])


def talk(*said: str) -> list[dict[str, Any]]:
    """`s:`, `u:` and `a:` before the words."""
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": roles[each[0]], "content": each[2:]} for each in said]


def test_an_older_template_is_rendered_turn_by_turn() -> None:
    said = render(CHATML, talk("s:S", "u:one", "a:two", "u:three"))
    assert said == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n"
        "<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n"
    )
    begun = render(CHATML, talk("u:one", "a:tw"), cut=True)
    assert begun == "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\ntw"
    assert render("[{{ .Prompt }}]", talk("u:a", "a:b", "u:c")) == "[a]b[c]"  # .Response is added behind it
    assert render("{{ .System }}/{{ .Prompt }}/", talk("s:S", "u:a", "s:T", "u:b")) == "S/a/T/b/"


def test_messages_are_rendered_at_once() -> None:
    assert render(MESSAGES, talk("s:S", "u:one", "a:two", "u:three")) == (
        "<|system|>\nS<|end|><|user|>\none<|end|><|assistant|>\ntwo<|end|><|user|>\nthree<|end|>\n<|assistant|>\n"
    )
    assert render("{{ .System }}:{{ range .Messages }}{{ .Content }},{{ end }}", talk("s:a", "u:b", "s:c")) == (
        "a\n\nc:a,b,c,"
    )
    both = "{{ if .Messages }}{{ range .Messages }}{{ .Content }};{{ end }}{{ else }}{{ .Prompt }}{{ end }}"
    assert render(both, talk("u:a", "a:b")) == "a;b;"


def test_neighbours_of_one_role_are_one_message() -> None:
    assert (
        render("{{ range .Messages }}<{{ .Content }}>{{ end }}", talk("u:a", "u:b", "a:c", "a:d")) == "<a\n\nb><c\n\nd>"
    )
    assert render("{{ .Prompt }}!", talk("u:a", "u:b")) == "a\n\nb!"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("a {{- .Prompt }} b", "ax b"),
        ("a {{ .Prompt -}} b", "a xb"),
        ("a\n {{- .Prompt -}} \n b", "axb"),
        ("a {{/* no words */}}{{ .Prompt }}", "a x"),
        ("a {{- /* no */ -}} b{{ .Prompt }}", "abx"),
        ('{{ if eq .Prompt "x" "y" }}1{{ else }}2{{ end }}', "1"),
        ('{{ if ne .Prompt "x" }}1{{ else }}2{{ end }}', "2"),
        ("{{ if and .Prompt (not .System) }}1{{ end }}", "1"),
        ("{{ if or .System .Prompt }}1{{ end }}", "1"),
        ('{{ if .System }}1{{ else if eq .Prompt "x" }}2{{ else }}3{{ end }}', "2"),
        ('{{ "<s>\\n" }}{{ .Prompt }}', "<s>\nx"),
        ("{{ `a\\n` }}", "a\\n"),
        ("{% if x %}{# {{ .Prompt }} #}%}", "{% if x %}{# x #}%}"),
        ("'\"\\{{ .Prompt }}", "'\"\\x"),
        ("\n{{ .Prompt }}\n", "\nx\n"),
        ("{{ $.Prompt }}", "x"),
        ("é\U0001f600\u2028{{ .Prompt }}", "é\U0001f600\u2028x"),
    ],
)
def test_small_parts(template: str, said: str) -> None:
    assert render(template, talk("u:x")) == said


@settings(max_examples=20, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30).filter(lambda t: "{{" not in t))
def test_any_text_between_actions_stays_as_it_is(text: str) -> None:
    text = text.replace("\r\n", "\n")
    if text.endswith("{"):
        text += " "
    assert render(text + "{{ .Prompt }}" + "|" + text, talk("u:x")) == f"{text}x|{text}"


BAD = {
    "{{ .Tools }}": "`.Tools`",
    "{{ range .Tools }}{{ end }}": "`range .Tools`",
    "{{ json .Messages }}": "`json .Messages`",
    "{{ with .System }}{{ end }}": "`with`",
    "{{ .Prompt | upper }}": "`.Prompt | upper`",
    "{{ .Suffix }}": "`.Suffix`",
    "{{ if .Think }}{{ end }}": "`.Think`",
    '{{ template "x" }}': "`template`",
    '{{ define "x" }}{{ end }}': "`define`",
    '{{ block "x" . }}{{ end }}': "`block`",
    "{{ . }}": "`.`",
    '{{ printf "%s" .Prompt }}': "`printf",
    "{{ 3 }}": "`3`",
    "{{ $x := .Prompt }}": "variable $x",
    "{{ range .Messages }}{{ .ToolCalls }}{{ end }}": "`.ToolCalls`",
    "{{ range .Messages }}{{ .System }}{{ end }}": "`.System`",
    "{{ range .Messages }}{{ else }}x{{ end }}": "`range` with",
    "{{ range .Messages }}{{ range .Messages }}{{ end }}{{ end }}": "`range .Messages`",
    "{{ range .Messages }}{{ break }}{{ end }}": "`break`",
    "{{ .Messages }}": "`.Messages`",
    "{{ range .Messages }}{{ end }}{{ .Prompt }}": "`.Prompt`",
    "{{ if eq (len .Messages) 1 }}{{ end }}": "`(`",
    "{{ if }}{{ end }}": "condition is not complete",
    "{{ if eq .Prompt }}{{ end }}": "`eq` needs two",
    "{{ if not .Prompt .System }}{{ end }}": "`not`",
    "{{ if (.Prompt }}{{ end }}": "bracket is not closed",
    "{{ if .Prompt": "no }}",
    "{{ if .Prompt }}": "without its end",
    "{{ end }}": "`end` belongs to nothing",
    "{{ else }}": "`else` belongs to nothing",
    "{{ if .Prompt }}{{ else }}{{ else }}{{ end }}": "a second `else`",
    "{{ }}": "empty",
    "{{ & }}": "cannot be read",
    "{{ %\nx }}": "`% x` cannot be read",
    "{{ `a\nb` .Zzz }}": "has no counterpart",
    "{{ if .System }}{{ .Response }}{{ else }}x{{ end }}": "has an `else`",
    "\n\n{{ .Zzz }}": "line 3: `.Zzz`",
    "{{ if .Prompt }}" * 40 + "{{ end }}" * 40: "more than 32 levels",
    '{{ "\\q" }}': "cannot be read",
    "{{ slice .Prompt 1 }}": "`slice",
    "{{ .Prompt.Length }}": "`.Prompt.Length`",
}


@pytest.mark.parametrize("template", BAD)
def test_what_has_no_counterpart_is_named(template: str) -> None:
    with pytest.raises(TemplateError) as told:
        to_jinja(template)
    assert BAD[template] in str(told.value) and "the model's own chat template" in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    "unit", ["{{", "{{ a ", "{{-", " -", "{{ .Prompt }}\n", "{{/* */}}", " {{- .Prompt -}} ", '{{ "', "{{ `"]
)
def test_no_template_takes_long(unit: str) -> None:
    """A reader that goes back at each of these would take hours."""
    began = time.process_time()
    with contextlib.suppress(TemplateError):
        to_jinja(unit * (MOST_CHARS // 2 // len(unit)))
    assert time.process_time() - began < 10
    with pytest.raises(TemplateError, match="more than 1000 words"):
        to_jinja("{{ if or" + " .Prompt" * 100_000 + " }}{{ end }}")
