"""Schemas as structured output at temperature 1: every answer that ends is valid, every one that is cut says so.

python bench/structured/answers.py [--schemas 300] [--model demo|tiny] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from schemas import schema

from tokenmill import LLM, SamplingParams
from tokenmill.testing.tiny import make_tiny


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=300)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    made = [schema(seed) for seed in range(options.schemas)]
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=options.max_tokens, structured_outputs={"json": s})
        for i, s in enumerate(made)
    ]
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_tiny(Path(folder) / "tiny")) if options.model == "tiny" else options.model
        with LLM(model, max_num_seqs=32) as llm:
            outputs = llm.generate(["A record: "] * len(made), params)
    for one, wanted in zip(outputs, made, strict=True):
        out = one.outputs[0]
        if out.finish_reason == "stop":
            valid = Draft202012Validator(wanted, format_checker=Draft202012Validator.FORMAT_CHECKER).is_valid(
                json.loads(out.text)
            )
            counts["valid" if valid else "invalid"] += 1
            if not valid:
                print("invalid:", json.dumps(wanted), out.text)
        else:
            counts[str(out.finish_reason)] += 1
    print(dict(counts))
    if options.json:
        options.json.write_text(json.dumps(counts))
    sys.exit(bool(counts["invalid"] or counts["error"]))


if __name__ == "__main__":
    main()
