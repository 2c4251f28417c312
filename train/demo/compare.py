"""Weights before and after a training. Owns: every suite asked of two folders through tokenmill on a CPU."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from model_card import before_table
from render import case_prompt
from suites import SUITES, items, judge

from tokenmill import LLM, SamplingParams


def shares(folder: str, count: int) -> dict[str, float]:
    """Share of right answers per suite (held-out wordings) in percent."""
    out: dict[str, float] = {}
    with LLM(model=folder, max_model_len=4096) as llm:
        for suite, (_, _, most) in SUITES.items():
            cases = items(suite, True, count)
            params = SamplingParams(temperature=0, max_tokens=most)
            made = [o.outputs[0] for o in llm.generate([case_prompt(c) for c in cases], params, use_tqdm=False)]
            right = sum(judge(c, o.text, o.finish_reason == "stop")["ok"] for c, o in zip(cases, made, strict=True))
            out[suite] = round(100 * right / count, 1)
            print(suite, out[suite], flush=True)
    return out


def main() -> None:
    """Ask both folders, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before")
    parser.add_argument("now", nargs="?", default="demo")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--report", type=Path)
    args = parser.parse_args()
    report = {"count": args.count, "before": shares(args.before, args.count), "now": shares(args.now, args.count)}
    print(before_table(report))
    if args.report:
        args.report.write_text(json.dumps(report, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
