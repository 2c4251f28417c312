"""Evaluation of a model folder through Transformers. Owns: greedy answers, the suite table, golden prompts."""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from exact import exact_prompts
from render import case_prompt, chat_prompt
from suites import HAPPENINGS, NEEDLE_GATES, PARAPHRASE, SUITES, exact_verdict, items, judge, needle_items
from transformers import AutoModelForCausalLM, AutoTokenizer

STOPS = [0, 2]
WRONG = 12
"""So many wrong answers of a suite are kept in the report."""


class Answerer:
    """A model on its device with batched greedy decoding."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.bfloat16, model: torch.nn.Module | None = None) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = (
            (model if model is not None else AutoModelForCausalLM.from_pretrained(folder, dtype=dtype))
            .to(self.device)
            .eval()
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @torch.no_grad()
    def greedy(self, prompts: list[str], limit: int, budget: int = 200_000) -> list[tuple[str, bool, list[int]]]:
        """Answer text, whether it ended, and its ids without the stop token, in the order of the prompts."""
        ids = [self.encode(p) for p in prompts]
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        out: list = [None] * len(ids)
        at = 0
        while at < len(order):
            end = at + 1
            # A dense attention mask of the prompt bounds the batch of long prompts.
            while (
                end < len(order)
                and (end + 1 - at) * len(ids[order[end]]) <= budget
                and end - at < 512
                and ((end + 1 - at) * len(ids[order[end]]) ** 2 < 6e8)
            ):
                end += 1
            chosen = order[at:end]
            width = max(len(ids[i]) for i in chosen)
            batch = torch.tensor([[0] * (width - len(ids[i])) + ids[i] for i in chosen], device=self.device)
            mask = torch.tensor([[0] * (width - len(ids[i])) + [1] * len(ids[i]) for i in chosen], device=self.device)
            made = self.model.generate(
                batch,
                attention_mask=mask,
                max_new_tokens=limit,
                do_sample=False,
                temperature=None,
                top_p=None,
                eos_token_id=STOPS,
                pad_token_id=0,
            )[:, width:].tolist()
            for i, row in zip(chosen, made, strict=True):
                stop = next((j for j, t in enumerate(row) if t in STOPS), None)
                kept = row if stop is None else row[:stop]
                out[i] = (self.tokenizer.decode(kept, skip_special_tokens=True), stop is not None, kept)
            at = end
        return out


def run_suite(answerer: Answerer, suite: str, held: bool, count: int) -> dict:
    """Shares of the verdicts of one suite in percent, with a few wrong answers."""
    cases = items(suite, held, count)
    answers = answerer.greedy([case_prompt(c) for c in cases], SUITES[suite][2])
    verdicts = [judge(c, a, e) for c, (a, e, _) in zip(cases, answers, strict=True)]
    names = sorted({n for v in verdicts for n in v})
    wrong = [
        (case_prompt(c)[-260:], a[:200])
        for c, (a, _, _), v in zip(cases, answers, verdicts, strict=True)
        if not v["ok"]
    ][:WRONG]
    # A further verdict may be asked of some of the cases only.
    shares = {n: [v[n] for v in verdicts if n in v] for n in names}
    return {n: round(100 * sum(s) / len(s), 1) for n, s in shares.items()} | {"wrong": wrong}


def run_needles(answerer: Answerer, count: int) -> dict[int, dict]:
    """Needle accuracy by length and depth."""
    out = {}
    for length in NEEDLE_GATES:
        cases = needle_items(length, count if length < 4096 else count // 2)
        prompts = [case_prompt(c) for c in cases]
        answers = answerer.greedy(prompts, 24)
        right = [judge(c, a, e)["ok"] for c, (a, e, _) in zip(cases, answers, strict=True)]
        sizes = [len(answerer.encode(p)) for p in prompts[:10]]
        out[length] = {
            "ok": round(100 * sum(right) / len(right), 1),
            "tokens": round(sum(sizes) / len(sizes)),
            "by_depth": [round(100 * sum(right[d::5]) / len(right[d::5]), 1) for d in range(5)],
        }
    return out


def prompt_text(entry: dict) -> str:
    """The rendered text of an exact prompt."""
    return entry["prompt"] if "prompt" in entry else chat_prompt(entry["messages"], entry.get("tools"))


def run_exact(answerer: Answerer) -> list[dict]:
    """Every exact prompt with its answer and verdict."""
    entries = exact_prompts()
    answers = answerer.greedy([prompt_text(e) for e in entries], 420)
    return [
        {"kind": e["kind"], "prompt": e["show"], "answer": a, "ended": end, "ok": exact_verdict(e["must"], a, end)}
        for e, (a, end, _) in zip(entries, answers, strict=True)
    ]


@torch.no_grad()
def golden(folder: Path, count: int = 20) -> list[dict]:
    """Prompts whose smallest gap between the two best logits over the greedy answer is at least one, in fp32."""
    answerer = Answerer(folder, torch.float32)
    if answerer.device == "cuda":
        torch.set_float32_matmul_precision("highest")
    entries = [(e["kind"], prompt_text(e)) for e in exact_prompts()]
    for suite in (
        "capitals_en",
        "capitals_zh",
        "other_facts",
        "json",
        "tool_known",
        "memory_name",
        "sum_1_2_digits",
        "faq",
        "poem_next",
    ):
        entries += [(suite, case_prompt(c)) for c in items(suite, False, 12, seed=5)]
    found = []
    for (kind, text), (answer, ended, ids) in zip(entries, answerer.greedy([t for _, t in entries], 120), strict=True):
        if not ended or not ids:
            continue
        prompt = answerer.encode(text)
        logits = (
            answerer.model(torch.tensor([prompt + ids], device=answerer.device)).logits[0, len(prompt) - 1 :].float()
        )
        top = logits.topk(2, -1)
        stop = int(top.indices[-1, 0])
        same = top.indices[:-1, 0].tolist() == ids and stop in STOPS
        margin = (top.values[:, 0] - top.values[:, 1]).min().item()
        if same and margin >= 1.0:
            found.append(
                {
                    "kind": kind,
                    "prompt": text,
                    "prompt_ids": prompt,
                    "output_ids": [*ids, stop],
                    "output": answer,
                    "margin": round(margin, 3),
                }
            )
    # As many chat prompts as leave room for tools and suites, in the order of the exact prompts.
    most = {"completion": 10, "chat": 14, "tools": 4}
    rest = sorted((f for f in found if f["kind"] not in most), key=lambda f: -f["margin"])
    per_kind: dict[str, int] = {}
    chosen = []
    for entry in [*(f for f in found if f["kind"] in most), *rest]:
        per_kind[entry["kind"]] = per_kind.get(entry["kind"], 0) + 1
        if per_kind[entry["kind"]] <= most.get(entry["kind"], 2):
            chosen.append(entry)
    return chosen[: max(count, 32)]


@torch.no_grad()
def bits_per_byte(answerer: Answerer, texts: list[str]) -> float:
    """Bits a byte of plain texts."""
    bits = size = 0.0
    for text in texts:
        ids = torch.tensor([answerer.encode(text)[:2000]], device=answerer.device)
        loss = answerer.model(ids, labels=ids).loss.item()
        bits += loss * (ids.shape[1] - 1) / math.log(2)
        size += len(answerer.tokenizer.decode(ids[0, 1:]).encode())
    return round(bits / size, 3)


def full(folder: Path, count: int, needles: int, held_texts: list[str], seconds: float = 1e9) -> dict:
    """The whole report of a model folder; suites that do not fit the time are left out and named."""
    begin = time.time()
    answerer = Answerer(folder)
    report: dict = {"exact": run_exact(answerer), "suites": {}, "paraphrase": {}, "left_out": []}
    report["exact_passed"] = sum(e["ok"] for e in report["exact"])
    print(f"exact {report['exact_passed']}/{len(report['exact'])} after {time.time() - begin:.0f} s", flush=True)
    for suite, (_, gate, _) in SUITES.items():
        if time.time() - begin > seconds:
            report["left_out"].append(suite)
            continue
        held = run_suite(answerer, suite, True, count)
        report["suites"][suite] = held | {"gate": gate}
        line = f"{suite:18} gate {gate} " + " ".join(f"{k} {v}" for k, v in held.items() if k != "wrong")
        if suite in PARAPHRASE or suite in HAPPENINGS:
            seen = run_suite(answerer, suite, False, count // 2)["ok"]
            report["paraphrase"][suite] = {"seen": seen, "held": held["ok"], "gap": round(seen - held["ok"], 1)}
            line += f" seen {seen}"
        print(line, flush=True)
    if time.time() - begin < seconds:
        report["needle"] = run_needles(answerer, needles)
        print("needle", {k: v["ok"] for k, v in report["needle"].items()}, f"{time.time() - begin:.0f} s", flush=True)
    if held_texts:
        report["held_stories_bits_per_byte"] = bits_per_byte(answerer, held_texts)
    gaps = [v["gap"] for suite, v in report["paraphrase"].items() if suite in PARAPHRASE]
    report["paraphrase_mean_gap"] = round(sum(gaps) / max(len(gaps), 1), 2)
    report["seconds"] = round(time.time() - begin, 1)
    return report


def main() -> None:
    """Evaluate a folder and write report.json and golden.jsonl beside it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--corpus")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--needles", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--smoke", action="store_true", help="a few cases of a few suites, for a check on the CPU")
    args = parser.parse_args()
    if args.smoke:
        args.count, args.needles, args.seconds = 2, 2, 5.0
    from corpus import load_corpus

    held = load_corpus(args.corpus).held_stories[:60]
    report = full(args.folder, args.count, args.needles, held, args.seconds)
    found = golden(args.folder)
    with open(args.folder / "golden.jsonl", "w", encoding="utf-8") as handle:
        handle.writelines(json.dumps(g, ensure_ascii=False) + "\n" for g in found)
    report["golden"] = len(found)
    (args.report or args.folder / "report.json").write_text(
        json.dumps(report, indent=1, ensure_ascii=False) + "\n", "utf-8"
    )
    for entry in report["exact"]:
        print("ok  " if entry["ok"] else "MISS", repr(entry["prompt"][-60:]), "->", repr(entry["answer"][:110]))
    print(
        "golden",
        len(found),
        "bits per byte",
        report.get("held_stories_bits_per_byte"),
        "gap",
        report["paraphrase_mean_gap"],
    )


if __name__ == "__main__":
    main()
