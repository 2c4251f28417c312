"""GBNF: exactly the texts that a grammar has, whatever its rules share; what is none is named."""

from __future__ import annotations

import itertools
import random

import pytest
from tests.pure.structured.bytewise import COMPILER, says

from tokenmill.core.errors import ParameterError
from tokenmill.structured.lowering import to_grammar

ARITHMETIC = """root  ::= (expr "=" ws term "\\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \\t\\n]*"""
JSON = r"""root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}  # optional
"""


def compiled(text):
    return COMPILER.constraint({"grammar": text})


CASES = [
    ('root ::=\n  "a"\n  | "b"', ["a", "b"], ["", "ab"]),
    ('root ::= "a" # one\n  # another\n  | item\n\nitem ::= "#" | "|"\n', ["a", "#", "|"], ["b"]),
    ('root ::= [#|"] "\\"|" | [\\]\\n]\n| "x ::= y"', ['#"|', '|"|', "]", "x ::= y"], ["x"]),
    ('root ::= x-y "a"{2}\nx-y ::= "c"?\n', ["aa", "caa"], ["a"]),
    ('root ::= a b\na ::= "x"*\nb ::= "x"', ["x", "xxx"], [""]),
    ('root ::= ("a" | "ab") "bc"', ["abc", "abbc"], ["ab"]),
    ('root ::= s\ns ::= "[" s "]" | [^"]*', ["x", "[[x]]", "[["], ['"']),
    ('root ::= x\nx ::= "a" x "b" | ""', ["", "ab", "aabb"], ["aab"]),
    ("root ::= . [^a]", ["a\n", "\nb", "é😀"], ["aa", ""]),
    ("root ::= [a&&b] [+--] [a~~b] [x-]", ["&,~-", "a+bx"], ["c+bx", "a.b-", "a+by"]),
    ('root ::= "\\\\u0041" [\\\\"/] "\\xe9\\u00e9\\U0001F600"', ["\\u0041/éé😀"], ["A/éé😀"]),
    ('root ::= start fooBar foo-bar foo_bar A a 1b -c\nstart ::= "s"\nfooBar ::= "a"\nfoo-bar ::= "b"\n'
     'foo_bar ::= "c"\nA ::= "y"\na ::= "z"\n1b ::= "1"\n-c ::= "-"', ["sabcyz1-"], []),
    ('start ::= "a"\nroot ::= start "b"', ["ab"], ["a"]),
    ('root ::= | ("a"?)? "b"{0} "c"{0,1} "d"{1,} ""', ["", "d", "acdd"], ["b"]),
    ('root ::= "a" loop | "b" (loop | "c") loop*\nloop ::= "x" loop', ["bc"], ["ax", "b"]),
    ('root ::= "// \'\\t" "日本" [あ-ん]+\r\n', ["// '\t日本あん"], ["// '\t日本x"]),
    (ARITHMETIC, ["1=2\n", "(a1+2)*3 = x\ny=2\n", "1=2 \n\n3=4\n"], ["1=2", "(1=2\n"]),
    (JSON, ["{}", '{"a":1.5e3, "b":[true,{}]}', '{"a":"x\\u00e9\\"y"}'], ['{"a":}', '{"a":"\\x"}', "[]"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "good", "bad"), CASES)
def test_what_a_grammar_has(text, good, bad):
    constraint = compiled(text)
    assert [says(constraint, each) for each in good + bad] == [True] * len(good) + [False] * len(bad)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('root ::= "a"\nroot ::= "b"', "'root' is there twice"),
        ('root ::= x\nx ::= "a"\n# x\nx::= "b"', "'x' is there twice"),
        ("root ::= a", "'a' is not there"),
        ('a ::= "x"', "no rule `root"),
        ('root ::= "x" root', "no text fits"),
        ('root ::= ("x"', r"a \) must stand in line 1"),
        ('root ::= "x\n', '" or ] must stand'),
        ('root ::= "a"\nb ::= "c"{x}', "in line 2"),
        ('root ::= "\\q"', "no such escape"),
        ('root ::= "\\ud83d"', "not a character"),
        ("root ::= [b-a]", "backwards"),
        ('root ::= "a"{3,2}', "backwards"),
        ('root ::= "a" => b', "'=> b'"),
        ('root ::= "a"\nb', "'b' is not there"),
        ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "nested too deeply"),
        ("root ::= a0\n" + "\n".join(f"a{i} ::= a{i + 1}" for i in range(3000)) + '\na3000 ::= "x"', "nested too deep"),
    ],
)
def test_what_is_none_is_named(text, words):
    with pytest.raises(ParameterError, match=words):
        to_grammar({"grammar": text})


def test_rules_that_double_are_not_spelt_out():
    text = "root ::= a0\n" + "\n".join(f'a{i} ::= a{i + 1} "x"? a{i + 1}' for i in range(30)) + '\na30 ::= "y"'
    assert len(to_grammar({"grammar": text})) < 20_000


def test_masks_are_quick_where_texts_are_lexemes():
    """A string of JSON is one lexeme, which the engine has masks for; nothing else in that grammar goes on so."""
    assert any("+)?(?:\\x22)" in line for line in to_grammar({"grammar": JSON}).splitlines())


def random_rule(rng, names, depth):
    kind = rng.random()
    if depth == 0 or kind < 0.35:
        if rng.random() < 0.35:
            return rng.choice(names)
        return rng.choice([{"a", "b"}, {"a"}, {"b"}, {"c"}, *(list(t) for t in ("ab", "aa", "ba", "aba", "bb"))])
    if kind < 0.65:
        return tuple(random_rule(rng, names, depth - 1) for _ in range(rng.randint(1, 3)))
    if kind < 0.85:
        return ("|", [random_rule(rng, names, depth - 1) for _ in range(2)] + [()] * (rng.random() < 0.2))
    return ("{", random_rule(rng, names, depth - 1), *rng.choice([(0, 9), (1, 9), (0, 1), (2, 2), (1, 2), (2, 9)]))


def written(rule):
    if isinstance(rule, str):
        return rule
    if isinstance(rule, set):
        return f"[{''.join(sorted(rule))}]"
    if isinstance(rule, list):
        return f'"{"".join(rule)}"'
    if rule[:1] == ("|",):
        return f"({' | '.join(map(written, rule[1]))})"
    if rule[:1] == ("{",):
        return f"({written(rule[1])}){{{rule[2]},{'' if rule[3] == 9 else rule[3]}}}"
    return f"({' '.join(map(written, rule))})"


def texts_of(rules, most):
    """All texts of `root` up to a length: what rules have grows until it stays the same."""
    found = {name: set() for name in rules}

    def has(rule):
        if isinstance(rule, str):
            return found[rule]
        if isinstance(rule, set):
            return rule
        if isinstance(rule, list):
            return {"".join(rule)}
        if rule[:1] == ("|",):
            return set().union(*map(has, rule[1]))
        if rule[:1] == ("{",):
            parts, now, every = has(rule[1]), {""}, {""} if rule[2] == 0 else set()
            for i in range(1, rule[3] + 1):
                now = {a + b for a in now for b in parts if len(a + b) <= most}
                every |= now if i >= rule[2] else set()
            return every
        now = {""}
        for part in rule:
            now = {a + b for a in now for b in has(part) if len(a + b) <= most}
        return now

    while True:
        before = sum(map(len, found.values()))
        for name, rule in rules.items():
            found[name] |= has(rule)
        if sum(map(len, found.values())) == before:
            return found["root"]


@pytest.mark.parametrize("seed", range(60))
def test_random_grammars_have_exactly_their_texts(seed):
    rng = random.Random(seed)
    names = ["root", "x", "y-z"][: rng.randint(1, 3)]
    rules = {name: random_rule(rng, names, rng.randint(1, 3)) for name in names}
    text = "\n".join(f"{name} ::= {written(rule)}" for name, rule in rules.items())
    wanted = texts_of(rules, 4)
    try:
        constraint = compiled(text)
    except ParameterError as error:
        assert not wanted and "no text fits" in str(error), text
        return
    for said in map("".join, itertools.chain.from_iterable(itertools.product("abc", repeat=n) for n in range(5))):
        assert says(constraint, said) is (said in wanted), (text, said)
