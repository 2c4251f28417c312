"""Quantised forms of a demo model through tokenmill. Owns: the suites per weight and cache format, and points lost."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from evaluate import prompt_text
from exact import exact_prompts
from render import case_prompt
from suites import SUITES, exact_verdict, items, judge, needle_items

from tokenmill import LLM, SamplingParams

FORMS: dict[str, dict[str, str]] = {
    "bfloat16": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int4 in groups of 128": {"quantization": "int4-g128"},
    "fp8": {"quantization": "fp8"},
    "int8 cache": {"kv_cache_dtype": "int8"},
}


LONG = ("story", "story_topic", "story_zh", "language", "story_asked")
"""Suites of long answers, left out."""


def results(folder: str, options: dict[str, str], suites: list[str], count: int, needles: int) -> dict[str, float]:
    """Share of right answers per suite in percent, the exact prompts passed, and one needle length."""
    out: dict[str, float] = {}
    with LLM(model=folder, max_model_len=4096, **options) as llm:

        def answers(prompts: list[str], limit: int) -> list[tuple[str, bool]]:
            made = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=limit), use_tqdm=False)
            return [(o.outputs[0].text, o.outputs[0].finish_reason == "stop") for o in made]

        for suite in suites:
            cases = items(suite, True, count)
            found = answers([case_prompt(c) for c in cases], SUITES[suite][2])
            right = sum(judge(c, a, e)["ok"] for c, (a, e) in zip(cases, found, strict=True))
            out[suite] = round(100 * right / count, 1)
        cases = needle_items(2048, needles)
        found = answers([case_prompt(c) for c in cases], 24)
        right = sum(judge(c, a, e)["ok"] for c, (a, e) in zip(cases, found, strict=True))
        out["needle 2k"] = round(100 * right / max(needles, 1), 1)
        entries = exact_prompts()
        found = answers([prompt_text(e) for e in entries], 420)
        out["exact"] = sum(exact_verdict(e["must"], a, end) for e, (a, end) in zip(entries, found, strict=True))
        out["exact_count"] = len(entries)
    return out


def main() -> None:
    """Evaluate every form and write the figures with the points lost against bfloat16."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default="demo")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--needles", type=int, default=20)
    parser.add_argument("--suites", default=",".join(s for s in SUITES if s not in LONG))
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--report", type=Path, required=True)
    args = parser.parse_args()
    report: dict = {"count": args.count, "needles": args.needles, "forms": {}}
    for form in args.forms.split(","):
        got = results(args.folder, FORMS[form], args.suites.split(","), args.count, args.needles)
        shares = [k for k in got if not k.startswith("exact")]
        base = report["forms"].get("bfloat16", got)
        lost = [base[k] - got[k] for k in shares]
        got["mean"] = round(sum(got[k] for k in shares) / len(shares), 2)
        got |= {"mean points lost": round(sum(lost) / len(lost), 2), "most points lost": round(max(lost), 1)}
        report["forms"][form] = got
        print(form, json.dumps(got), flush=True)
        args.report.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
