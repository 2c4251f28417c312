"""Diagrams of Mermaid: what is drawn is what was written, and what cannot be drawn in whole stays a source."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.web.conftest import Servers, Tabs, using
from tests.web.page_chat_helpers import ended, say
from tokenmill.testing.fake_generator import FakeOptions

READ = """return a.map(t => { const c = m.readFlow(t); return c && {
    nodes: Object.fromEntries([...c.nodes].map(([id, n]) => [id, n.shape + ': ' + n.lines.join('/')])),
    edges: c.edges.map(e => [e.from, e.start + '-' + e.kind + '-' + e.end, e.to, e.lines.join('/'), e.span].join(' ')),
    home: Object.fromEntries([...c.home].map(([id, g]) => [id, g.lines.join(' ')])), direction: c.direction }; });"""


def flows(page: Any, *texts: str) -> list[Any]:
    found: list[Any] = using(page, "flowtext", READ, list(texts))
    return found


SHAPES = {
    "A[b]": "rect: b",
    "A(b c)": "round: b c",
    "A([b])": "stadium: b",
    "A[[b]]": "frame: b",
    "A[(b)]": "cylinder: b",
    "A((b))": "circle: b",
    "A(((b)))": "double: b",
    "A{b?}": "rhombus: b?",
    "A{{b}}": "hexagon: b",
    "A[/b/]": "right: b",
    "A[\\b\\]": "left: b",
    "A[/b\\]": "trapezoid: b",
    "A[\\b/]": "funnel: b",
    "A>b]": "flag: b",
    'A["b [c] (d)"]': "rect: b [c] (d)",
    'A["`**b**<br/>c #quot;d#quot;`"]': 'rect: b/c "d"',
    "A[fa:fa-car b]:::cool": "rect: b",
    "A": "rect: A",
}
EDGES = {
    "A --> B": "A -solid-> B  1",
    "A---B": "A -solid- B  1",
    "A -.-> B": "A -dotted-> B  1",
    "A ==> B": "A -thick-> B  1",
    "A --x B": "A -solid-x B  1",
    "A --o B": "A -solid-o B  1",
    "A <--> B": "A >-solid-> B  1",
    "A ~~~ B": "A -hidden- B  1",
    "A ---> B": "A -solid-> B  2",
    "A -->|yes, do| B": "A -solid-> B yes, do 1",
    "A -- yes --> B": "A -solid-> B yes 1",
    "A -. no .-> B": "A -dotted-> B no 1",
    "A == go ==> B": "A -thick-> B go 1",
    'A -->|"a|b"| B': "A -solid-> B a|b 1",
}


def test_shapes_and_edges_are_read(modules: Any) -> None:
    made = flows(modules, *(f"graph TD\n{text}" for text in SHAPES))
    assert {text: found and found["nodes"]["A"] for text, found in zip(SHAPES, made, strict=True)} == SHAPES
    made = flows(modules, *(f"graph LR\n{text}" for text in EDGES))
    assert {text: found and found["edges"][0] for text, found in zip(EDGES, made, strict=True)} == EDGES


def test_chains_groups_and_directions_are_read(modules: Any) -> None:
    (found,) = flows(
        modules,
        "%% a comment\nflowchart RL\nsubgraph one [The first]\nA & B --> C; C --> D\nend\n"
        "subgraph two\nsubgraph three\nE\nend\nD\nend\nclassDef x fill:#fff;\nstyle A fill:#f00\nclick A href",
    )
    assert found["direction"] == "RL" and len(found["edges"]) == 3
    assert found["home"] == dict.fromkeys("ABCD", "The first") | {"E": "three"}


NONE = [
    "graph TD",
    "graph TD\nA --> ",
    "graph TD\nA -->",
    "graph TD\nA[open",
    "graph TD\nsubgraph x\nA",
    "graph TD\nA@{ shape: x }",
    "graph TD\nsubgraph A\nB\nA\nend\nA --> C",
    "graph XX\nA",
    "pie\n",
    "",
    "graph TD\n" + "\n".join(f"N{i} --> N{i + 1}" for i in range(300)),
]


def test_what_is_not_understood_in_whole_is_not_drawn(modules: Any) -> None:
    assert flows(modules, *NONE) == [None] * len(NONE)
    talks = ["sequenceDiagram", "sequenceDiagram\nA->>B", "sequenceDiagram\nloop x\nA->>B: y", "sequenceDiagram\nend"]
    talks += ["sequenceDiagram\nbox a\nA->>B: c\nend", "sequenceDiagram\ncreate participant A\nA->>B: c"]
    assert using(modules, "sequence", "return a.map(t => m.readSequence(t));", talks) == [None] * len(talks)


def chart(draw: random.Random) -> str:
    names = [f"n{i}" for i in range(draw.randint(2, 14))]
    lines = [f"{name}[{'word ' * draw.randint(1, 4)}]" for name in names]
    for name in names[1:]:
        label = draw.choice(["", "", "|yes|", "|a longer text|"])
        lines.append(f"{draw.choice(names)} -->{label} {name}")
    if draw.random() < 0.5:
        half = len(names) // 2
        lines += ["subgraph one", *names[:half], "end", "subgraph two", *names[half:-1], "end"]
    return f"graph {draw.choice(['TD', 'LR', 'BT', 'RL'])}\n" + "\n".join(lines)


def test_no_node_covers_another_and_edges_end_at_their_nodes(modules: Any) -> None:
    draw = random.Random(3)
    faults, drawn = using(
        modules,
        "diagram",
        """const faults = [];
        let drawn = 0;
        for (const text of a) {
            const svg = await m.draw(text);
            if (!svg) continue;
            drawn += 1;
            document.body.append(svg);
            const whole = svg.getBoundingClientRect();
            const boxes = [...svg.querySelectorAll('.node')].map(n => n.getBoundingClientRect());
            const meet = (x, y) => x.left < y.right && x.right > y.left && x.top < y.bottom && x.bottom > y.top;
            boxes.forEach((b, i) => {
                if (boxes.some((other, k) => k < i && meet(b, other))) faults.push(['covered', text]);
                const out = b.left < whole.left - 1 || b.right > whole.right + 1 || b.bottom > whole.bottom + 1;
                if (out) faults.push(['out', text]);
            });
            for (const path of svg.querySelectorAll('.edge > path:first-child')) {
                for (const at of [0, path.getTotalLength()]) {
                    const point = path.getPointAtLength(at).matrixTransform(path.getScreenCTM());
                    const is = { left: point.x - 3, right: point.x + 3, top: point.y - 3, bottom: point.y + 3 };
                    if (!boxes.some(b => meet(b, is))) faults.push(['loose', text]);
                }
            }
            if (/NaN|undefined/.test(svg.outerHTML)) faults.push(['NaN', text]);
            svg.remove();
        }
        return [faults, drawn];""",
        [chart(draw) for _ in range(40)],
    )
    assert faults == [] and drawn > 25


TALK = """sequenceDiagram
autonumber
participant A as Ann
actor B
A->>+B: Hello there
B-->>-A: Yes
Note over A,B: both<br>of them
alt good
A-)B: on
else bad
B--xA: off
end
A->>A: think
"""


def test_a_talk_is_read_and_goes_downwards(modules: Any) -> None:
    found = using(
        modules,
        "sequence",
        """const read = m.readSequence(a);
        const places = m.placeSequence(read, lines => ({w: 60, h: 18 * lines.length}));
        return {people: read.people, ys: read.steps.filter(s => s.y).map(s => s.y), frames: places.frames.length,
            heads: read.steps.filter(s => s.kind === 'message').map(s => [s.from, s.to, s.dotted, s.head]),
            at: places.at,
            end: places.end, bars: places.bars.length};""",
        TALK,
    )
    assert [p["lines"] for p in found["people"]] == [["Ann"], ["B"]] and found["people"][1]["actor"] is True
    assert found["heads"][:2] == [[0, 1, False, "full"], [1, 0, True, "full"]]
    assert [head for *_, head in found["heads"][2:]] == ["open", "x", "full"]
    assert found["ys"] == sorted(found["ys"]) and found["ys"][-1] < found["end"]
    assert found["frames"] == 1 and found["bars"] == 1 and found["at"][0] < found["at"][1]


def test_noise_ends_without_an_error(modules: Any) -> None:
    draw = random.Random(5)
    bits = ["A", "B", "[", "]", "(", ")", "{", "}", "-->", "---", "-.->", "|x|", "&", "\n", "subgraph s\n", "end\n"]
    bits += [
        "A->>B: t\n",
        "loop l\n",
        "else\n",
        "Note over A: n\n",
        '"',
        ";",
        ":::c",
        "activate A\n",
        "<br>",
        "%%",
        "@{",
    ]
    heads = ["graph TD\n", "flowchart LR\n", "sequenceDiagram\n", "---\ntitle: x\n---\ngraph BT\n"]
    texts = [draw.choice(heads) + "".join(draw.choices(bits, k=draw.randint(1, 30))) for _ in range(300)]
    texts += [
        "graph TD\n" + "A --> B\n" * 5000,
        "graph TD\n" + "subgraph a\n" * 3000,
        "sequenceDiagram\n" + "loop x\n" * 200,
    ]
    code = "const bad = []; for (const t of a) await m.draw(t).catch(() => bad.push(t)); return bad;"
    assert using(modules, "diagram", code, texts) == []


ANSWER = """Here:

```mermaid
graph TD
    A[Start] --> B{"<img src=x onerror=alert(1)>"}
    B -->|Yes| C[javascript:alert]
```

```mermaid
journey
  title Pets
  Feed: 3: Me
```
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_picture_stands_for_its_source(serve: Servers, tab: Tabs, scheme: Any) -> None:
    page = tab(
        serve(FakeOptions(script=ANSWER)).url, color_scheme=scheme, permissions=["clipboard-read", "clipboard-write"]
    )
    say(page, "Draw")
    ended(page)
    picture = page.get_by_role("img", name="Flow chart: Start to <img src=x onerror=alert(1)>;")
    picture.wait_for()
    assert page.locator(".prose img, .drawing a, .drawing foreignObject").count() == 0
    first, second = page.locator(".code").nth(0), page.locator(".code").nth(1)
    assert first.locator("pre").is_hidden() and second.locator("pre").is_visible()
    second.get_by_text("Pets · Journey, as Mermaid source").wait_for()
    first.get_by_role("button", name="Source").click()
    assert first.locator("pre").is_visible() and first.locator(".drawing").is_hidden()
    first.get_by_role("button", name="Source").click()
    first.get_by_role("button", name="Copy").click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()").startswith("graph TD\n    A[Start]")
    fill, ground = first.locator(".node rect").first.evaluate(
        "e => [getComputedStyle(e).fill, getComputedStyle(e.closest('.drawing')).backgroundColor]"
    )
    assert fill != ground
    page.emulate_media(forced_colors="active")
    letters, box = first.locator(".node").first.evaluate(
        "e => [getComputedStyle(e.querySelector('text')).fill, getComputedStyle(e.querySelector('rect')).fill]"
    )
    assert letters != box
