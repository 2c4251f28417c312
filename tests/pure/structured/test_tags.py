"""Trees of formats: neighbours in one text, fields without an effect, and texts that would be forced for ever."""

from __future__ import annotations

import pytest
from tests.pure.structured.bytewise import COMPILER, says

from tokenmill.core.errors import BusyError, ParameterError
from tokenmill.structured.compiled_grammar import UNFORCED
from tokenmill.structured.lowering import lower_spec

ANY = {"type": "any_text"}
INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}


def const(text):
    return {"type": "const_string", "value": text}


def rx(pattern, **more):
    return {"type": "regex", "pattern": pattern, **more}


def row(*elements):
    return {"type": "sequence", "elements": list(elements)}


def either(*elements):
    return {"type": "or", "elements": list(elements)}


def some(kind, content, **more):
    return {"type": kind, "content": content, **more}


def tag(begin, content, end):
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(*tags, **more):
    return {"type": "triggered_tags", "triggers": ["<f"], "tags": list(tags), **more}


def separated(*tags, **more):
    return {"type": "tags_with_separator", "tags": list(tags), **more}


def tree(node, **more):
    return {"structural_tag": {"type": "structural_tag", "format": node, **more}}


MEETING = [
    (row(rx("x*"), const("x")), ["x", "xx"], [""]),
    (row(rx("a*"), tag("", rx("b+"), "")), ["aab", "b"], ["a"]),
    (row(either(const("a"), const("ab")), const("bc")), ["abc", "abbc"], ["ab"]),
    (row(some("star", const("ab")), const("ac")), ["ac", "abac"], ["a"]),
    (row(some("optional", const("a")), const("ab")), ["ab", "aab"], ["b"]),
    (tag("<f>", rx(".*"), "</f>"), ["<f>a</f>", "<f></f>"], ["<f>a", "<f>\n</f>"]),
    (tag("<f>", rx("[0-9]+"), "5"), ["<f>15"], ["<f>5"]),
    (tag("<f>", either(rx(".*"), const("no")), "</f>"), ["<f>a</f>", "<f>no</f>"], ["<f>"]),
    (row(tag("<f>", rx(".*"), "</f>"), INTEGER), ["<f>a</f>1"], ["<f>a</f>x", "<f>a1"]),
    (row(tag("<f>", some("optional", rx("[a-z]+")), "</f>"), INTEGER), ["<f>a</f>1", "<f></f>1"], ["<f>A</f>1"]),
    (row(tag("<f>", ANY, ["</f>", "</g>"]), INTEGER), ["<f>a</f>1", "<f></g>1"], ["<f>a</f>x"]),
    (some("star", tag("<f>", rx("[^<]*"), "</f>")), ["", "<f>a</f><f></f>"], ["<f>"]),
    (some("repeat", const("ab"), min=1, max=2), ["ab", "abab"], ["", "ababab"]),
    (some("repeat", row(INTEGER, const(";")), min=2), ["1;2;", "1;2;3;"], ["1;"]),
    (some("plus", rx("a{1,2}")), ["a", "aaa", "aaaa"], [""]),
    (some("repeat", rx("a{1,2}"), min=2), ["aa", "aaaa"], ["a"]),
    (either(const("bb"), some("star", row(rx("a?b"), const("bb")))), ["", "bb", "bbb", "abbb"], ["b", "bbbb"]),
    (separated(tag("a", rx("a?"), ""), tag("aa", const("b"), ""), separator="a"), ["a", "aaa", "aaaaab"], ["ab"]),
    (row(ANY, const("x")), ["x", "ax"], ["a", "axb"]),
    (row(ANY, tag("<a>", INTEGER, "</a>")), ["hi<a>1</a>", "<a>1</a>"], ["hi", "hi<a>b</a>"]),
    (row(const("a"), ANY, const("x"), ANY), ["ax", "abxc"], ["a", "xa"]),
    # An end of one byte that comes at once, behind a number or a text that could have gone on.
    (row(INTEGER, ANY, const("x")), ["1x", "1ax", "12x"], ["1xyx", "1axyx", "1"]),
    (row(INTEGER, tag("", ANY, ";"), INTEGER), ["1;2", "1a;2"], ["1;a;2", "1;"]),
    (row(INTEGER, tag("", ANY, [";", ";;x"]), INTEGER), ["1;2", "1a;2"], ["1;a;2", "1;"]),
    (row(INTEGER, rx("[a-z]*"), const("x"), INTEGER), ["1x2", "1ax2"], ["1xx2", "1axx2"]),
    (row(INTEGER, rx("[a-z]+"), const("x"), INTEGER), ["1xx2", "1ax2"], ["1x2", "1xxx2"]),
    (row(either(const("a"), const("ab")), ANY, const(">"), INTEGER), ["a>1", "ab>1", "ax>1"], ["a>>1", "ab>x>1"]),
    (row(INTEGER, {**ANY, "excludes": ["no"]}, const(";"), INTEGER), ["1;2", "1a;2"], ["1no;2", "1;a;2"]),
    ({**triggered(tag("<", INTEGER, "")), "triggers": ["<"]}, ["<1", "a<1<2", "<1a<2b"], ["<", "<1<a"]),
    (tag("<a>", {**ANY, "excludes": ["<b>"]}, "</a>"), ["<a>x</a>"], ["<a><b></a>"]),
    (rx(".*", excludes=["bad"]), ["good", ""], ["so bad"]),
    (triggered(tag("<f>", rx(".*"), "</f>")), ["", "a\nb", "a<f>x</f>b<f>y</f>\n"], ["<f>x", "<fx"]),
    (triggered(tag("<f>", INTEGER, ""), excludes=["bad"]), ["good", "g<f>1"], ["bad", "bad<f>1", "<f>1bad"]),
    (row(triggered(tag("<f>", INTEGER, "</f>")), const("END")), ["END", "x<f>1</f>yEND"], ["x", "ENDz"]),
    (triggered(tag("<f>", ANY, "</f>"), stop_after_first=True), ["x", "x<f>1</f>"], ["x<f>1</f>y"]),
]


@pytest.mark.parametrize(("node", "good", "bad"), MEETING, ids=str)
def test_neighbours_that_begin_or_end_alike(node, good, bad):
    constraint = COMPILER.constraint(tree(node))
    assert [t for t in good if not says(constraint, t)] == []
    assert [t for t in bad if says(constraint, t)] == []


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (tree(row(ANY, INTEGER)), "what follows any_text"),
        (tree(row(ANY, rx("[0-9]"), INTEGER)), "what follows any_text"),
        (tree(some("star", row(INTEGER, ANY))), "what follows any_text"),
        (tree({**const("a"), "vlaue": "b"}), "no field 'vlaue'"),
        (tree({**INTEGER, "style": "qwen_xml"}), "style 'qwen_xml'"),
        (tree({**rx("a"), "flags": "i"}), "no field 'flags'"),
        (tree({**tag("<f>", ANY, "</f>"), "at_least_one": True}), "no field 'at_least_one'"),
        (tree(triggered({**tag("<f>", ANY, "</f>"), "schema": {}})), "no field 'schema'"),
        (tree(triggered(tag("<f>", ANY, "</f>"), stop_after_first="yes")), "stop_after_first"),
        (tree(some("repeat", const("a"), min=3, max=2)), "not below min"),
        (tree(tag({"type": "token", "token": 7}, ANY, "x")), "begin, a text"),
        (tree(tag("<f>", ANY, [])), "needs an end"),
        (tree(tag("<f>", ANY, {"type": "token", "token": 7})), "literals must be strings"),
        (tree(const("a"), trigger="x"), "no field 'trigger'"),
        ({"structural_tag": {"structures": [{"begin": "<f>", "end": "", "name": "x"}], "triggers": ["<f"]}}, "'name'"),
    ],
    ids=str,
)
def test_what_would_have_no_effect_is_refused_by_name(spec, words):
    with pytest.raises(ParameterError, match=words):
        COMPILER.constraint(spec)


ENDLESS = {
    "Lark": {"grammar": 'start: /x*/ "x"'},
    "Lark, behind others": {"grammar": 'start: "k" /[a-z]{30}/ X "x"\nX: "x"*'},
    "Lark that asks for it": {"grammar": '%llguidance {"no_forcing": false}\nstart: "k" /[a-z]{30}/ /x*/ "x"'},
    "a tree": tree(row(rx("x+"), some("plus", row(const("x"), INTEGER)))),
    "a tree, behind others": tree(row(rx("[a-z]{30}"), rx("x+"), some("plus", row(const("x"), INTEGER)))),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_text_that_is_forced_for_ever_stops_nobody(name):
    """The engine would look for its end for ever, and hold the interpreter's lock meanwhile."""
    try:
        constraint = COMPILER.constraint(ENDLESS[name])
    except (ParameterError, BusyError):  # a busy machine may not get to its end
        return
    constraint.accept(list(b"k" + b"a" * 29 if "tree" in name else b"k" + b"a" * 30))
    for _ in range(5):
        assert constraint.forced() == []
        constraint.accept(list(b"x"))


def test_where_every_text_has_an_end_it_is_forced():
    for node in (tag("<f>", ANY, "</f>"), row(rx("[a-z]+"), const("x"), INTEGER), row(const("ab"), rx("c*"))):
        assert UNFORCED not in lower_spec(tree(node))
    assert COMPILER.constraint(tree(tag("<f>", INTEGER, "</f>"))).forced() == list(b"<f>")
