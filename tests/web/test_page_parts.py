"""The page's modules that know nothing of the page, in the browser: formulas, JSON, trees, files, samples."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.web.conftest import using

FORMULAS = {
    r"x_1^{n+1}": "<msubsup><mi>x</mi><mn>1</mn><mrow><mi>n</mi><mo>+</mo><mn>1</mn></mrow></msubsup>",
    r"\frac12": "<mfrac><mn>1</mn><mn>2</mn></mfrac>",
    r"x^12": "<msup><mi>x</mi><mn>1</mn></msup><mn>2</mn>",
    r"\sqrt[3]{x}": "<mroot><mi>x</mi><mn>3</mn></mroot>",
    r"\sum_{i}^n": "<munderover><mo>∑</mo><mi>i</mi><mi>n</mi></munderover>",
    r"f''": "<msup><mi>f</mi><mo>′′</mo></msup>",
    r"\mathbb{R}": "ℝ",
    r"\mathbf{x}": "𝐱",
    r"\not\in": "<mo>∉</mo>",
    r"{n \choose k}": '<mfrac linethickness="0"><mi>n</mi><mi>k</mi></mfrac>',
    r"\begin{bmatrix}1&2\\3&4\end{bmatrix}": "<mtr>",
    r"\left(\frac{a}{b}\right]": 'form="postfix">]</mo>',
    r"\text{if } x": "<mtext>if\u00a0</mtext>",
    r"\unknown": "<merror><mtext>\\unknown</mtext></merror>",
    r"a < b & c": "&lt;",
}


def test_formulas_become_mathml(modules: Any) -> None:
    made = using(modules, "tex", "return a.map(t => m.texToMathml(t, true));", list(FORMULAS))
    for (source, wanted), text in zip(FORMULAS.items(), made, strict=True):
        assert wanted in text, (source, text)


def test_any_formula_is_well_formed_and_ends(modules: Any) -> None:
    """Noise, and depth that would overflow a stack."""
    bad = using(
        modules,
        "tex",
        r"""
        const bits = ['\\frac','\\mathrm','\\mathbf','\\boldsymbol','\\mathsf','\\ce','\\hline','\\genfrac','\\cancel',
          '\\hspace','\\min','\\pmod','{','}','^','_','x','12','\\left','\\right','(',')','\\begin{cases}',
          '\\end{cases}','&','\\\\','\\sqrt','[',']',"'",'\\text','\\over','\\sum','\\limits','$','%','\n','\\','<','>','\\not','\\color','\\xrightarrow'];
        let state = 7;
        const random = () => (state = (state * 48271) % 2147483647) / 2147483647;
        const bit = () => bits[Math.floor(random() * bits.length)];
        const texts = Array.from({length: 3000}, () => Array.from({length: 1 + random() * 25}, bit).join(''));
        const deep = ['{', '\\over', '\\sqrt[', '\\left(', '\\displaystyle', 'x^', '\\substack{', '\\begin{cases}'];
        texts.push(...deep.map(t => t.repeat(1400)));
        const faults = [];
        for (const text of texts) {
          const open = [];
          for (const [, end, name] of m.texToMathml(text).matchAll(/<(\/?)([a-z]+)[^>]*?>/g)) {
            if (!end) open.push(name); else if (open.pop() !== name) faults.push(text.slice(0, 80));
          }
          if (open.length) faults.push(text.slice(0, 80));
        }
        return faults;""",
    )
    assert bad == []


def test_formulas_in_markdown_and_prices_that_are_none(modules: Any) -> None:
    texts = {
        "Costs $5 or $6, or 7$ and 8$ again.": 0,
        "Inline $x^2$ and \\(y\\) here.": 2,
        "\\[ a\n= b \\]": 1,
        "$$\na\n$$": 1,
        "Then $$a$$ in words.": 1,
        "`$x$` and ``\\(y\\)``": 0,
        "```\n$x$\n```": 0,
        "\\begin{align}a&=b\\end{align}": 1,
        "- item \\(x\\)\n\n> \\[ y \\]": 2,
        "\\[ never closed": 0,
    }
    found = using(
        modules,
        "markdown",
        """return a.map(t => { const box = document.createElement('div'); new m.GrowingMarkdown(box).update(t, true);
        return [box.querySelectorAll('math').length, box.querySelectorAll('[style], script').length]; });""",
        list(texts),
    )
    assert found == [[count, 0] for count in texts.values()]


def test_a_formula_cannot_act(modules: Any) -> None:
    hostile = [
        r"\text{<img src=x onerror=alert(1)>}",
        r"\color{red\" onmouseover=\"alert(1)} x",
        r"\operatorname{<script>}",
    ]
    found = using(
        modules,
        "markdown",
        """return a.map(t => { const box = document.createElement('div');
        new m.GrowingMarkdown(box).update('$$' + t + '$$', true);
        return box.querySelectorAll('img, script, [onerror], [onmouseover], maction, [href]').length; });""",
        hostile,
    )
    assert found == [0, 0, 0]


def test_json_is_read_while_it_grows(modules: Any) -> None:
    text = r'{"a": [1, -2.5e3, true, null, "x\u00e9\n"], "b": {}}'
    states = using(modules, "validate", "return [...a].map((_, i) => m.readJson(a.slice(0, i)).state);", text)
    assert set(states) == {"open"}
    wholes = using(
        modules,
        "validate",
        "return a.map(t => m.readJson(t).state);",
        [text, "12", "1.", "[1,]", "{a", "01", '"\n"', "nul", "{} x"],
    )
    assert wholes == ["whole", "whole", "open", "wrong", "wrong", "wrong", "wrong", "open", "wrong"]


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "mood": {"enum": ["glad", "sad"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 2},
        "next": {"$ref": "#"},
    },
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("value", "paths"),
    [
        ({"name": "a", "mood": "sad", "ages": [1]}, []),
        ({"mood": "angry"}, ["mood", "name"]),
        ({"name": "", "other": 1}, ["name", "other"]),
        ({"name": "a", "ages": [1, -1, 2.5]}, ["ages", "ages[1]", "ages[2]"]),
        ({"name": "a", "next": {"name": 5}}, ["next.name"]),
        ([], ["the whole"]),
    ],
)
def test_faults_of_an_answer_are_named(modules: Any, value: Any, paths: list[str]) -> None:
    found = using(modules, "validate", "return m.faults(a[0], a[1]).map(f => f.path);", [value, SCHEMA])
    assert sorted(found) == sorted(paths)


TALK = """
  const { add, choose, emptyAnswer, emptyConversation } = await import('/static/tree.js');
  const c = emptyConversation(); c.title = 'Mills';
  const q = add(c, null, {role: 'user', content: 'Hi', files: [{name: 'a.txt', text: 'grain'}]});
  const first = add(c, q.id, {...emptyAnswer('First'), model: 'demo'});
  add(c, q.id, emptyAnswer('Second'));
  const next = add(c, first.id, {role: 'user', content: 'Next'});
  add(c, first.id, {role: 'user', content: 'Other'});
  choose(c, next);
"""


@pytest.mark.parametrize("form", ["own", "openwebui", "openai"])
def test_a_tree_survives_every_format(modules: Any, form: str) -> None:
    found = using(
        modules,
        "exchange",
        TALK
        + """const { path } = await import('/static/tree.js');
        const [back] = m.readFile(JSON.stringify(m.FORMATS[a].write([c])));
        const again = path(back);
        const beside = (n) => (n.parent === null ? back.roots : back.nodes[n.parent].children).length;
        return {shown: again.map(n => n.content), nodes: Object.keys(back.nodes).length, title: back.title,
                branches: again.map(beside), files: again[0].files ?? null};""",
        form,
    )
    assert found["shown"][1:] == ["First", "Next"] and found["shown"][0].startswith("Hi")
    assert (found["nodes"], found["title"], found["branches"]) == (5, "Mills", [1, 2, 2])
    assert ("grain" in found["shown"][0]) == (form != "own")
    assert (found["files"] == [{"name": "a.txt", "text": "grain"}]) == (form == "own")


def test_foreign_files_are_read_or_refused_in_words(modules: Any) -> None:
    read = """return a.map(t => { try { return m.readFile(t).map(c => [c.title, Object.keys(c.nodes).length]); }
        catch (error) { return error.constructor.name + ': ' + error.message; } });"""
    messages = '[{"role":"system","content":"x"},{"role":"user","content":"q"},{"role":"assistant","content":"a"}]'
    lines = '{"messages":[{"role":"user","content":"q"}]}\n{"messages":[{"role":"user","content":"w"}]}'
    answers = [{"content": "a", "tools": []}, {"content": "b", "tools": []}]
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "at": 1, "answers": answers}]
    first = {"id": "1", "title": "Old", "messages": turns}
    said = {"author": {"role": "user"}, "content": {"parts": ["x"]}}
    loop = {"a": {"id": "a", "parent": "b", "message": said}, "b": {"id": "b", "parent": "a", "message": None}}
    old, cycle = json.dumps(first), json.dumps({"mapping": loop, "current_node": "a"})
    assert using(modules, "exchange", read, [messages, lines, old, cycle]) == [
        [["q", 2]],
        [["q", 1], ["w", 1]],
        [["Old", 3]],
        [["x", 1]],
    ]
    for refusal in using(
        modules, "exchange", read, ["", "x", "{}", "[]", "5", "[null]", '{"nodes":{"a":null}}', '{"messages":[null]}']
    ):
        assert isinstance(refusal, str) and refusal.startswith("Error: T"), refusal


def test_nothing_is_drawn_where_nothing_was_measured(modules: Any) -> None:
    columns = ["at", "running", "output_tokens", "prompt_tokens", "cached_tokens"]
    samples = [[100, 1, 0, 0, 0], [101, 2, 50, 10, 30], [200, 1, 80, 10, 30], [201, 0, 90, 10, 30]]
    found = using(modules, "series", "return m.series(a[0], a[1]);", [columns, samples])
    assert found["at"] == [100, 101, 150.5, 200, 201]
    assert found["running"] == [1, 2, None, 1, 0] and found["out"] == [None, 50, None, 30, 10]
    assert found["hits"] == [None, 0.75, None, None, None]
    now = using(
        modules,
        "series",
        "const s = m.series(...a); return [m.recent(s, 'out', 201), m.recent(s, 'out', 300), m.middle(s, 'hits', 0)];",
        [columns, samples],
    )
    assert now == [22, None, 0.75]


def test_speed_is_the_engines_or_none(modules: Any) -> None:
    def figures(first: float, last: float, count: int) -> Any:
        events = [{"event": "accepted", "at_ms": 1}, {"event": "started", "at_ms": 2}]
        events += [{"event": "first_token", "at_ms": first}, {"event": "last_token", "at_ms": last}]
        return using(
            modules, "stream", "return m.engineFigures({events: a[0], output_tokens: a[1]}, a[1]);", [events, count]
        )

    assert figures(10, 10, 8)["rate"] is None  # one read
    assert figures(10, 11, 8)["rate"] is None  # 7,000 tokens per second of eight tokens say nothing
    assert figures(10, 110, 11) == {"first": 10, "queue": 1, "rate": 100}


def test_lanes_and_cells(modules: Any) -> None:
    asked = [
        {"at": at, "duration_ms": ms, "state": state}
        for at, ms, state in ((90, 5000, "ended"), (91, 1000, "ended"), (96, 0, "open"), (10, 1000, "ended"))
    ]
    lanes = using(modules, "series", "return m.lanes(a, 60, 100, 12).lanes.map(l => l.map(r => r.at));", asked)
    assert lanes == [[90, 96], [91]]
    close = [{"at": 60 + i, "duration_ms": 1020, "state": "ended"} for i in range(40)]  # one at a time, end on end
    code = "const {lanes, left} = m.lanes(a, 60, 100, 12); return [lanes.length, left];"
    assert using(modules, "series", code, close) == [1, 0]
    cells = using(modules, "series", "return m.cells({blocks: 1000, used: 300, shared: 1, idle: 100}, 100);")
    assert [cells.count(kind) for kind in ("shared", "used", "cached", "free")] == [1, 30, 10, 59]


def test_schemas_become_forms_and_back(modules: Any) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Nantes", "Lyon"]},
            "days": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["city"],
        "additionalProperties": False,
    }
    assert using(modules, "fields", "return m.schemaOf(m.rowsOf(a));", schema) == schema
    assert using(modules, "fields", "return m.rowsOf({type: 'object', properties: {a: {anyOf: []}}});") is None


CODE = '''def f(a):  # one
    """a
    text"""
    return "b" + 12 if a else g(a)  # end
'''


def test_code_has_its_final_colours_while_it_grows(modules: Any) -> None:
    """Whole lines are coloured as they are at the end, and nothing of the text is lost; an open string waits."""
    states, final = using(
        modules,
        "highlight",
        """const code = document.createElement('code');
        code.dataset.language = 'python';
        const node = document.createTextNode('');
        code.append(node);
        const shown = () => [...code.children].map(e => [e.className, e.textContent]);
        const states = [];
        for (const letter of a) {
            node.appendData(letter);
            m.highlightLines(code, node);
            states.push([code.textContent, shown()]);
        }
        m.highlight(code);
        return [states, shown()];""",
        CODE,
    )
    assert [text for text, _ in states] == [CODE[: i + 1] for i in range(len(CODE))]
    for _, coloured in states:
        assert coloured == final[: len(coloured)]
    assert states[-1][1] == final and ["s", '"""a\n    text"""'] in final
    assert not any(kind == "s" for kind, _ in states[CODE.index("text")][1])
