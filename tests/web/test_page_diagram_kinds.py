"""States, classes, entities, pies and Gantt charts of Mermaid: what is drawn is what was written."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.web.conftest import using

GRAPH = """return a.map(t => { const c = m[READ](t); return c && {
    nodes: Object.fromEntries([...c.nodes].map(([id, n]) => [id, [n.shape, n.lines.join('/'), n.rows ?? null]])),
    edges: c.edges.map(e =>
        [e.from, `${e.start}-${e.kind}-${e.end}`, e.to, e.lines.join('/'), e.near ?? '', e.far ?? '']),
    home: Object.fromEntries([...c.home].map(([id, g]) => [id, g.lines.join(' ')])), direction: c.direction }; });"""


def graphs(page: Any, module: str, function: str, *texts: str) -> list[Any]:
    found: list[Any] = using(page, module, GRAPH.replace("READ", f"'{function}'"), list(texts))
    return found


STATES = """%% a comment
stateDiagram-v2
    direction LR
    [*] --> Idle
    Idle --> Busy : take, do
    Idle : waits
    state "Very busy" as Busy
    state Busy {
        [*] --> Reading
        Reading --> [*]
    }
    state pick <<choice>>
    Busy --> pick:::cool
    note right of Idle : quiet
    note left of Idle
        two
        lines
    end note
    classDef cool fill:#f00
"""


def test_states_are_read(modules: Any) -> None:
    (found,) = graphs(modules, "statetext", "readStates", STATES)
    assert found["direction"] == "LR"
    assert found["nodes"] == {
        "\nstart": ["start", "", None],
        "Idle": ["round", "waits", None],
        "Busy\nstart": ["start", "", None],
        "Reading": ["round", "Reading", None],
        "Busy\nstop": ["stop", "", None],
        "pick": ["choice", "", None],
        "Idle\nnote 5": ["note", "quiet", None],
        "Idle\nnote 6": ["note", "two/lines", None],
    }
    assert found["home"] == dict.fromkeys(["Busy\nstart", "Reading", "Busy\nstop"], "Very busy")
    assert [edge[:4] for edge in found["edges"][:2]] == [
        ["\nstart", "-solid->", "Idle", ""],
        ["Idle", "-solid->", "Busy", "take, do"],
    ]
    assert found["edges"][4][:3] == ["Busy", "-solid->", "pick"]


CLASSES = """classDiagram
    direction RL
    class Animal {
        <<interface>>
        +String name
        +move(int by)* bool
        +all()$
    }
    Animal <|-- Dog
    Dog : +List~String~ tricks
    Owner "1" *-- "0..*" Dog : keeps
    class Box["A box"]
    <<service>> Owner
    note for Dog "It barks"
    namespace Farm {
        class Barn
    }
    style Dog fill:#f00
"""
RELATIONS = {
    "A <|-- B": "kind-solid-",
    "A<|--B": "kind-solid-",
    "A --|> B": "-solid-kind",
    "A *-- B": "part-solid-",
    "A o-- B": "share-solid-",
    "A --o B": "-solid-share",
    "A --> B": "-solid-open",
    "A -- B": "-solid-",
    "A ..> B": "-dotted-open",
    "A ..|> B": "-dotted-kind",
    "A .. B": "-dotted-",
    "A <--> B": "open-solid-open",
    "Foo--Bar": "-solid-",
}


def test_classes_are_read(modules: Any) -> None:
    (found,) = graphs(modules, "classtext", "readClasses", CLASSES)
    nodes = found["nodes"]
    assert nodes["Animal"] == [
        "rect",
        "«interface»/Animal",
        [["+String name"], ["+move(int by) {abstract} bool", "+all() {static}"]],
    ]
    assert nodes["Dog"] == ["rect", "Dog", [["+List<String> tricks"], []]]
    assert (
        nodes["Box"][1] == "A box"
        and nodes["Owner"][1] == "«service»/Owner"
        and nodes["\n1"] == ["note", "It barks", None]
    )
    assert found["edges"][1] == ["Owner", "part-solid-", "Dog", "keeps", "1", "0..*"]
    assert found["home"] == {"Barn": "Farm"} and found["direction"] == "RL"
    made = graphs(modules, "classtext", "readClasses", *(f"classDiagram\n{text}" for text in RELATIONS))
    assert {text: one and one["edges"][0][1] for text, one in zip(RELATIONS, made, strict=True)} == RELATIONS


def test_entities_are_read(modules: Any) -> None:
    text = (
        'erDiagram\nA ||--o{ "B c" : "has, many"\nA }|..|| D : is\nD[Thing] {\nint id PK, FK "the key"\nstring name\n}'
    )
    (found,) = graphs(modules, "classtext", "readEntities", text)
    assert found["nodes"]["D"] == ["rect", "Thing", [["int id PK, FK – the key", "string name"]]]
    assert found["edges"] == [
        ["A", "one-solid-many", "B c", "has, many", "", ""],
        ["A", "some-dotted-one", "D", "is", "", ""],
    ]


def test_pies_and_plans_are_read(modules: Any) -> None:
    text = 'pie showData title Pets\n"Dogs" : 3\n"Cats": 1.5\n'
    slices = [{"name": "Dogs", "size": 3}, {"name": "Cats", "size": 1.5}]
    assert using(modules, "pie", "return m.readPie(a);", text) == {"title": "Pets", "data": True, "slices": slices}
    text = "gantt\ntitle Mill\nsection One\nDig :done, a, 2026-01-01, 2d\nBuild: crit, after a, 2026-01-10\n"
    text += "Open :milestone, 0d"
    found = using(modules, "gantt", "return m.readGantt(a);", text)
    day = 86_400_000
    assert [((t["to"] - found["tasks"][0]["from"]) / day, t["kinds"]) for t in found["tasks"]] == [
        (2, ["done"]),
        (9, ["crit"]),
        (9, ["milestone"]),
    ]
    text = "gantt\nexcludes weekends\nA :2024-01-05, 3d"
    found = using(modules, "gantt", "return m.readGantt(a).tasks[0];", text)
    assert (found["to"] - found["from"]) / day == 5, "Friday, Monday, Tuesday"
    text = "gantt\ndateFormat HH:mm\nRise: 06:30, 15m\nWork: 8h"
    found = using(modules, "gantt", "return m.readGantt(a);", text)
    assert found["tasks"][1]["to"] - found["tasks"][0]["from"] == 8.25 * 3_600_000


NONE = [
    "stateDiagram-v2",
    "stateDiagram-v2\nA --> ",
    "stateDiagram-v2\nstate A {\nB",
    "stateDiagram-v2\n}",
    "stateDiagram-v2\nstate A {\nB\n--\nC\n}",
    "stateDiagram-v2\nnote right of A\nopen",
    "stateDiagram-v2\nstate A {\nB --> A\n}",
    "stateDiagram-v2\nA --> B\nstate B {\n}",
    "stateDiagram-v2\n" + "\n".join(f"state s{i} {{\nn{i}" for i in range(80)) + "\n}" * 80,
    "classDiagram",
    "classDiagram\nclass A {\n+x",
    "classDiagram\nA ->> B",
    "classDiagram\nnamespace N {\nclass A",
    "erDiagram",
    "erDiagram\nA {\nint\n}",
    "erDiagram\nA --> B",
    "pie",
    'pie\n"A" : -1',
    'pie\n"A" : 0',
    "pie\nA : 1",
    "gantt",
    "gantt\nA : 2026-01-01",
    "gantt\nA : after b, 2d",
    "gantt\nA : 2026-13-01, 2d",
    "gantt\nexcludes friday\nA : 2026-01-01, 2d",
    "gantt\nexcludes weekends\nA : 2026-01-01, 9999w",
    "gantt\ndateFormat X\nA : 5, 2d",
    "flowchart TD\nsubgraph A\nB\nend\nA --> B",
    "constructor\nA",
    "mindmap\nroot",
]
DRAWN = {
    STATES: "State diagram: the start to waits; waits, take, do, to Very busy; the start to Reading",
    CLASSES: "Class diagram: «interface» Animal to Dog; «service» Owner, keeps, to Dog",
    "erDiagram\nA ||--o{ B : has": "Entity diagram: A, has, to B",
    'pie title Pets\n"Dogs" : 3\n"Cats" : 1': "Pie chart Pets: Dogs (75 %); Cats (25 %)",
    'pie\n"Dogs" : 3\n"Cats" : 0': "Pie chart: Dogs (100 %); Cats (0 %)",
    "gantt\ntitle Mill\nDig :done, 2026-01-01, 2d": "Gantt chart Mill: Dig (done) from ",
    "sequenceDiagram\nA->>B: hi": "Sequence diagram: A to B: hi",
}


def test_each_kind_is_drawn_with_words_or_not_at_all(modules: Any) -> None:
    code = """const found = [];
    for (const t of a) {
        const svg = await m.draw(t);
        found.push(svg && [svg.getAttribute('aria-label'), /NaN|undefined|null/.test(svg.outerHTML)]);
    }
    return found;"""
    assert using(modules, "diagram", code, NONE) == [None] * len(NONE)
    for (text, wanted), found in zip(DRAWN.items(), using(modules, "diagram", code, list(DRAWN)), strict=True):
        assert found and found[0].startswith(wanted) and not found[1], (text, found)


NESTED = """graph TD
subgraph Front
    UI --> API
end
subgraph Back
    subgraph Data
        DB
    end
    Svc --> Data
end
Front --> Back
API --> Svc"""
GROUPS = "\nA[Client] --> S\nsubgraph S [The server]\nB --> C\nB --> D\nend\n"
GROUPS += "S -->|kept| E\nE --> S\nsubgraph W\nF\nend\nS -.-> W"


@pytest.mark.parametrize("direction", ["TB", "BT", "LR", "RL"])
def test_edges_of_groups_end_at_their_frames(modules: Any, direction: str) -> None:
    loose = using(
        modules,
        "diagram",
        """const svg = await m.draw(a);
        document.body.append(svg);
        const rects = (what) => [...svg.querySelectorAll(what)].map((each) => each.getBoundingClientRect());
        const boxes = rects('.node');
        const frames = rects('.group rect');
        const near = (x, y) => Math.abs(x - y) < 3;
        const onBorder = (f, p) => p.x > f.left - 3 && p.x < f.right + 3 && p.y > f.top - 3 && p.y < f.bottom + 3
            && (near(p.x, f.left) || near(p.x, f.right) || near(p.y, f.top) || near(p.y, f.bottom));
        const loose = [];
        for (const path of svg.querySelectorAll('.edge > path:first-child')) {
            const end = (at) => path.getPointAtLength(at).matrixTransform(path.getScreenCTM());
            const at = (some, p) => some.some((each) => onBorder(each, p));
            const ends = [0, path.getTotalLength()].map(end);
            loose.push(ends.map((p) => (at(boxes, p) ? 'n' : '') + (at(frames, p) ? 'f' : '')).sort().join(' '));
        }
        svg.remove();
        return loose.sort();""",
        f"graph {direction}{GROUPS}",
    )
    assert loose == ["f f", "f n", "f n", "f n", "n n", "n n"]


def test_a_node_without_edges_stays_beside_the_others(modules: Any) -> None:
    code = "return Number((await m.draw(a)).getAttribute('width'));"
    assert using(modules, "diagram", "return Boolean(await m.draw(a));", NESTED)
    text = "graph TD\nA --> B & C\nD\nB --> E & F\nC --> G & H\n"
    assert using(modules, "diagram", code, text) < 650
    assert (
        using(
            modules, "diagram", code, "classDiagram\nO --> A\nO *-- H\nA <|-- D\nA <|-- C\nD o-- K\nW <|.. D\nclass L"
        )
        < 650
    )


def test_noise_of_every_kind_ends_without_an_error(modules: Any) -> None:
    draw = random.Random(7)
    bits = [
        "A",
        "B",
        "[*]",
        " --> ",
        " : t",
        "\n",
        "state A {\n",
        "}\n",
        "note right of A : x\n",
        "<<fork>>",
        "--\n",
        "direction LR\n",
    ]
    bits += [
        "class A {\n",
        "+m()\n",
        " <|-- ",
        ' "1" ',
        "~T~",
        "<<x>>",
        "namespace N {\n",
        " ||--o{ ",
        "int id PK\n",
        '"A" : 3\n',
        "title x\n",
    ]
    bits += [
        "section s\n",
        "A : a1, 2026-01-01, 3d\n",
        "B : after a1, 2d\n",
        "crit, ",
        "milestone",
        "A --> B\n",
        "C o-- D\n",
        "state C\n",
    ]
    heads = ["stateDiagram-v2\n", "classDiagram\n", "erDiagram\n", "pie\n", "gantt\n", "graph LR\nsubgraph A\nX\nend\n"]
    texts = [draw.choice(heads) + "".join(draw.choices(bits, k=draw.randint(1, 25))) for _ in range(400)]
    texts += [
        "stateDiagram-v2\n" + "state a {\n" * 3000,
        "classDiagram\n" + "A" * 20000 + "--",
        "pie\n" + '"a" : 9' + "9" * 500,
    ]
    texts += ["gantt\nA : 0001-01-01, 9999999999999w", "erDiagram\n" + "A ||--|| B : x\n" * 3000]
    code = """const bad = [];
    for (const t of a) {
        const drawn = await m.draw(t).then((svg) => svg?.outerHTML ?? '', () => 'NaN');
        if (/NaN|undefined|Infinity/.test(drawn)) bad.push(t);
    }
    return bad;"""
    assert using(modules, "diagram", code, texts) == []
