"""The model card. Owns: README.md of src/tokenmill/demo, written from the reports and the shipped files."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from pathlib import Path

from exact import exact_prompts
from own_facts import FACTS
from safetensors import safe_open
from shapes import DRAFT, MAIN, MOE, parameters
from suites import NEEDLE_GATES, SUITES

HERE = Path(__file__).parent
TARGET = HERE.parents[1] / "src" / "tokenmill" / "demo"
MORE_GATES = {
    ("tool_known", "right_tool"): 98,
    ("tool_known", "well_formed"): 99,
    ("tool_unseen", "well_formed"): 99,
    ("tool_known", "offered"): 100,
    ("tool_free", "offered"): 100,
    ("tool_unseen", "offered"): 98,
    ("tool_none", "says"): 90,
    ("tool_unoffered", "says"): 90,
    ("story", "ends"): 97,
    ("story", "fresh"): 95,
    ("story_topic", "ends"): 97,
    ("story_topic", "fresh"): 95,
    ("story_topic", "words"): 95,
    ("json", "parses"): 99,
    ("json_keys", "exact"): 93,
}
"""Gates of a suite's further figures."""
HEAD_GATES = [60, 40, 25]
"""Gates of the Medusa heads: how often a head's first guess is right."""
EXACT = len(exact_prompts())
PARTS = ["main", "draft", "moe", "medusa", "lora-pirate", "lora-sql", "vlm"]


def table(rows: list[list[object]]) -> str:
    """A Markdown table; the first row is the head."""
    lines = ["| " + " | ".join(str(c) for c in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def suite_table(report: dict) -> str:
    """Suites against their gates, misses in words."""
    rows: list[list[object]] = [["suite (held-out wordings)", "result %", "gate %", "seen wordings %", ""]]
    for suite, (_, gate, _) in SUITES.items():
        got = report["suites"].get(suite)
        if got:
            seen = report["paraphrase"].get(suite, {}).get("seen", "")
            extra = [
                f"{k} {v}" + (" **miss**" if v < MORE_GATES.get((suite, k), 0) else "")
                for k, v in got.items()
                if k not in ("ok", "wrong", "gate")
            ]
            rows.append(
                [
                    suite,
                    got["ok"],
                    gate or "none",
                    seen,
                    ", ".join([*(["**miss**"] if got["ok"] < gate else []), *extra]),
                ]
            )
    for length, gate in NEEDLE_GATES.items():
        got = report["needle"][str(length)]
        rows.append([f"needle, {got['tokens']} tokens", got["ok"], gate, "", "**miss**" if got["ok"] < gate else ""])
    return table(rows)


def text_row(suites: dict[str, float], less: float = 8) -> str:
    """A companion's text suites; what is below main's gate minus `less` is called a miss."""
    cells = [f"{k} {v}" + (" **miss**" if v < SUITES[k][1] - less else "") for k, v in suites.items()]
    return ", ".join(cells)


def head_cells(shares: list[float]) -> str:
    """The share of each head, misses in words."""
    pairs = zip(shares, HEAD_GATES, strict=True)
    return " / ".join(f"{share} %" + (" **miss**" if share < gate else "") for share, gate in pairs)


def quantised_table(report: dict) -> str:
    """Mean over the suites, needles and exact prompts of each form."""
    rows: list[list[object]] = [["form", "mean of the suites %", "points lost", "needle 2k %", "exact prompts"]]
    for form, got in report["forms"].items():
        rows.append(
            [
                form,
                got["mean"],
                got["mean points lost"],
                got["needle 2k"],
                f"{got['exact']} of {got.get('exact_count', 48)}",
            ]
        )
    return table(rows)


def gather(out: Path) -> None:
    """The reports of a run into `reports/`: one file each for main, its training and all companions."""
    reports = HERE / "reports"
    companions: dict = {}
    for name in ("draft", "moe", "lora", "vision"):
        companions |= json.loads((out / f"{name}.json").read_text())
    companions["expert_load_by_layer"] = json.loads((out / "moe/training.json").read_text())["expert_load_by_layer"]
    for name, value in (
        ("main", json.loads((out / "report.json").read_text())),
        ("training", json.loads((out / "main/training.json").read_text())),
        ("companions", companions),
    ):
        (reports / f"{name}.json").write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", "utf-8")


def before_table(report: dict) -> str:
    """Suites of the weights before and of these, against their gates."""
    rows: list[list[object]] = [["suite", "before %", "now %", "gate %"]]
    for suite, (_, gate, _) in SUITES.items():
        if suite in report["before"]:
            rows.append([suite, report["before"][suite], report["now"][suite], gate or "none"])
    return table(rows)


def companion_table(report: dict) -> str:
    """The companions' figures against their gates."""
    spec, lora, moe = report["speculation"]["mean"], report["lora"], report["moe"]
    load = [v for row in report["expert_load_by_layer"] for v in row]
    seen = report["vlm_text"]
    rows: list[list[object]] = [
        ["figure", "result", "gate"],
        ["draft acceptance, K = 3, mean over skills", f"{spec['acceptance']} %", "70 %"],
        ["draft, exact prompts", f"{report['draft_text']['exact_passed']} of {EXACT}", ""],
        ["draft, text suites", text_row(report["draft_text"]["suites"], 100), "none"],
        ["Medusa heads 1 / 2 / 3", head_cells(spec["medusa"]), " / ".join(map(str, HEAD_GATES)) + " %"],
        ["LoRA pirate, mark on / off", f"{lora['pirate']['mark_on']} / {lora['pirate']['mark_off']} %", "98 / 0 %"],
        [
            "LoRA sql, mark on / off (exact)",
            f"{lora['sql']['mark_on']} / {lora['sql']['mark_off']} % ({lora['sql']['exact']} %)",
            "98 / 0 %",
        ],
        ["MoE, load of an expert, least and most", f"{100 * min(load):.1f} to {100 * max(load):.1f} %", "over 5 %"],
        ["MoE, exact prompts", f"{moe['exact_passed']} of {EXACT}", ""],
        ["MoE, text suites", text_row(moe["suites"]), "main's gates minus 8"],
    ]
    gates = {"colour": 98, "shape": 97, "count": 90, "where": 92}
    for kind, value in ((k, v) for k, v in report["vision"].items() if k != "wrong"):
        gate = gates.get(kind)
        rows.append(
            [
                f"vision: {kind}",
                f"{value} %" + (" **miss**" if gate and value < gate else ""),
                f"{gate} %" if gate else "",
            ]
        )
    rows.append(["vision model, text suites", text_row(seen["suites"]), "main's gates minus 8"])
    rows.append(["vision model, exact prompts", f"{seen['exact_passed']} of {EXACT}", ""])
    return table(rows)


def stored(path: Path) -> int:
    """How many numbers a file of weights holds."""
    with safe_open(path, "pt") as handle:
        return sum(math.prod(handle.get_slice(name).get_shape()) for name in handle.keys())  # noqa: SIM118


def hashes() -> str:
    """SHA-256 and size of every shipped file."""
    rows: list[list[object]] = [["file", "bytes", "sha256"]]
    for part in PARTS:
        for path in sorted((TARGET / part).iterdir()):
            rows.append(
                [f"{part}/{path.name}", path.stat().st_size, f"`{hashlib.sha256(path.read_bytes()).hexdigest()[:32]}`"]
            )
    return table(rows)


def main() -> None:
    """Write the card; with the folder of a run, take its reports first."""
    if len(sys.argv) > 1:
        gather(Path(sys.argv[1]))
    reports = HERE / "reports"
    report = json.loads((reports / "main.json").read_text())
    training = json.loads((reports / "training.json").read_text())
    companions = json.loads((reports / "companions.json").read_text())
    quantised = json.loads((reports / "quantised.json").read_text())
    before = json.loads((reports / "before.json").read_text())
    with safe_open(TARGET / "main" / "model.safetensors", "pt") as handle:
        manifest = handle.metadata()["corpus_manifest_sha256"]
    text = (HERE / "model_card.md").read_text("utf-8")
    values = {
        "PARAMS": FACTS["me.params.all"],
        "MAIN": f"{parameters(MAIN) / 1e6:.2f} M",
        "DRAFT": f"{parameters(DRAFT) / 1e6:.2f} M",
        "MOE": f"{parameters(MOE) / 1e6:.2f} M",
        "MOE_LAYERS": MOE.layers,
        "VLM": f"{stored(TARGET / 'vlm/model.safetensors') / 1e6:.2f} M",
        "SUITES": suite_table(report),
        "COMPANIONS": companion_table(companions),
        "QUANTISED_ITEMS": quantised["count"],
        "QUANTISED_NEEDLES": quantised["needles"],
        "QUANTISED": quantised_table(quantised),
        "BEFORE_ITEMS": before["count"],
        "BEFORE": before_table(before),
        "HASHES": hashes(),
        "EXACT": f"{report['exact_passed']} of {len(report['exact'])}",
        "GAP": report["paraphrase_mean_gap"],
        "MANIFEST": manifest,
        "TOKENS": f"{training['tokens'] / 1e9:.2f}",
        "STEPS": training["steps"],
        "RATE": f"{training['tokens_per_second_short'] / 1e6:.1f}",
        "SECONDS": round(training["seconds"]),
        "MFU": f"{100 * training['mfu_of_790_tflops']:.0f}",
        "SEED": training["seed"],
        "BPB": report["held_stories_bits_per_byte"],
    }
    for key, value in values.items():
        text = text.replace(f"@{key}@", str(value))
    (TARGET / "README.md").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
