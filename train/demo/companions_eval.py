"""Evaluation of the companions. Owns: draft acceptance, Medusa accuracy, LoRA marks, expert load, vision accuracy."""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path

import torch
import vision
import vision_scenes as pictures
from evaluate import WRONG, Answerer, run_exact, run_suite
from lora import MARKS, pirate_case, sql_case
from peft import PeftModel
from render import case_prompt, chat_prompt
from safetensors.torch import load_file
from suites import SUITES, items
from transformers import AutoModelForCausalLM

SPEC = [
    "capitals_en",
    "capitals_zh",
    "other_facts",
    "sum_3_digits",
    "memory_name",
    "json",
    "tool_known",
    "faq",
    "joke",
    "poem_next",
    "story",
]
TEXT_SUITES = [
    "capitals_en",
    "capitals_zh",
    "other_facts",
    "reversed_facts",
    "sum_1_2_digits",
    "division",
    "memory_name",
    "json",
    "json_keys",
    "tool_known",
    "tool_unoffered",
    "language",
    "faq",
    "joke",
    "story",
]


@torch.no_grad()
def speculation(main: Answerer, draft: torch.nn.Module, heads: dict[str, torch.Tensor], count: int) -> dict:
    """Draft acceptance at K=3 and Medusa head accuracy on the main model's own greedy answers, by skill."""
    out = {}
    matrix = main.model.get_input_embeddings().weight
    for suite in SPEC:
        prompts = [case_prompt(c) for c in items(suite, False, count, seed=77)]
        answers = main.greedy(prompts, SUITES[suite][2])
        proposed = accepted = verified = 0
        right, total = [0, 0, 0], [0, 0, 0]
        for prompt, (_, ended, made) in zip(prompts, answers, strict=True):
            ids = main.encode(prompt)
            full = torch.tensor([ids + made + ([2] if ended else [])], device=main.device)
            truth = full[0, len(ids) :]
            if len(truth) < 2:
                continue
            agree = (draft(full[:, :-1]).logits[0, len(ids) - 1 :].argmax(-1) == truth).tolist()
            at = 0
            while at < len(truth):
                window = agree[at : at + 3]
                kept = next((i for i, ok in enumerate(window) if not ok), len(window))
                proposed, accepted, verified, at = proposed + len(window), accepted + kept, verified + 1, at + kept + 1
            hidden = main.model.model(full[:, :-1]).last_hidden_state[0, len(ids) - 1 :]
            for head in range(3):
                h = hidden
                for block in range(2):
                    w, b = heads[f"blocks.{head}.layers.{block}.weight"], heads[f"blocks.{head}.layers.{block}.bias"]
                    h = h + torch.nn.functional.silu(h @ w.T + b)
                guess = (h @ matrix.T).argmax(-1)
                ahead = head + 1
                if len(truth) > ahead:
                    right[head] += int((guess[: len(truth) - ahead] == truth[ahead:]).sum())
                    total[head] += len(truth) - ahead
        out[suite] = {
            "acceptance": round(100 * accepted / max(proposed, 1), 1),
            "tokens_per_step": round((accepted + verified) / max(verified, 1), 2),
            "medusa": [round(100 * r / max(t, 1), 1) for r, t in zip(right, total, strict=True)],
        }
    mean = {
        "acceptance": round(sum(v["acceptance"] for v in out.values()) / len(out), 1),
        "medusa": [round(sum(v["medusa"][i] for v in out.values()) / len(out), 1) for i in range(3)],
    }
    return {"mean": mean, "by_skill": out}


def adapters(folder: Path, count: int) -> dict:
    """Share of answers with the mark, with and without each adapter, and exact SQL."""
    out = {}
    for kind, make in (("pirate", pirate_case), ("sql", sql_case)):
        rng = random.Random(55)
        cases = [make(rng, True) for _ in range(count)]
        prompts = [case_prompt(c) for c in cases]
        plain = Answerer(folder / "main")
        off = plain.greedy(prompts, 48)
        base = AutoModelForCausalLM.from_pretrained(folder / "main", dtype=torch.bfloat16)
        model = PeftModel.from_pretrained(base, folder / f"lora-{kind}")
        on = Answerer(folder / "main", model=model.to(torch.bfloat16)).greedy(prompts, 48)
        out[kind] = {
            "mark_on": round(100 * sum(a.startswith(MARKS[kind].strip()) for a, _, _ in on) / count, 1),
            "mark_off": round(100 * sum(a.startswith(MARKS[kind].strip()) for a, _, _ in off) / count, 1),
            "sample": [prompts[0][-120:], on[0][0]],
        }
        if kind == "sql":
            exact = sum(a.strip() == c.expect for (a, _, _), c in zip(on, cases, strict=True))
            out[kind]["exact"] = round(100 * exact / count, 1)
    return out


@torch.no_grad()
def seeing(folder: Path, count: int) -> dict:
    """Accuracy of the vision model by kind of question, with some wrong answers of each kind."""
    from transformers import LlavaForConditionalGeneration

    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.bfloat16)
    answerer = Answerer(folder, model=model)
    out: dict = {}
    wrong: dict[str, list] = {}
    for kind in ("colour", "shape", "count", "where", "where_held", "yesno", "describe"):
        # Asked in wordings that training never has, and in the usual ones.
        held, kind_asked = kind.endswith("_held"), kind.removesuffix("_held")
        rng = random.Random(f"see/{kind}")
        right = total = 0
        groups: dict[int, list] = {}
        while total < count:
            objects = pictures.scene(rng)
            got, q, a, must = pictures.question(rng, objects, kind_asked, held=held)
            if got != kind_asked:
                continue
            total += 1
            prompt = answerer.encode(chat_prompt(pictures.messages_of(q, a)[:1], None))
            groups.setdefault(len(prompt), []).append((prompt, pictures.draw(objects, rng), a, must, q, objects))
        for rows in groups.values():
            made = answerer.model.generate(
                input_ids=torch.tensor([r[0] for r in rows], device=answerer.device),
                attention_mask=torch.ones(len(rows), len(rows[0][0]), dtype=torch.long, device=answerer.device),
                pixel_values=vision.pixels([r[1] for r in rows], answerer.device).bfloat16(),
                max_new_tokens=64,
                do_sample=False,
                eos_token_id=[0, 2],
                pad_token_id=0,
            )[:, len(rows[0][0]) :]
            for row, ids in zip(rows, made.tolist(), strict=True):
                stop = next((i for i, t in enumerate(ids) if t in (0, 2)), len(ids))
                text = answerer.tokenizer.decode(ids[:stop], skip_special_tokens=True).strip()
                good = text == row[2].strip() if kind == "describe" else bool(re.search(row[3], text))
                right += good
                if not good and len(wrong.setdefault(kind, [])) < WRONG:
                    seen = ", ".join(" ".join(o) for o in row[5])
                    wrong[kind].append([f"{row[4]} [{seen}]", text])
        out[kind] = round(100 * right / total, 1)
    return out | {"wrong": wrong}


def text_gates(folder: Path, count: int, model: torch.nn.Module | None = None) -> dict:
    """A companion's own text suites and the number of exact prompts it passes."""
    answerer = Answerer(folder, model=model)
    done = {s: run_suite(answerer, s, True, count) for s in TEXT_SUITES}
    wrong = {s: row["wrong"] for s, row in done.items() if row["wrong"]}
    exact = run_exact(answerer)
    missed = [[e["prompt"][-100:], e["answer"][:100]] for e in exact if not e["ok"]]
    return {
        "suites": {s: row["ok"] for s, row in done.items()},
        "exact_passed": sum(e["ok"] for e in exact),
        "wrong": wrong | ({"exact": missed} if missed else {}),
    }


def main() -> None:
    """Evaluate every companion that is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--parts", default="", help="only these, separated by commas")
    parser.add_argument("--smoke", action="store_true", help="two cases a suite, for a check on the CPU")
    args = parser.parse_args()
    args.count = 2 if args.smoke else args.count
    folder, report = args.folder, {}

    def note(name: str, make) -> None:
        try:
            report[name] = make()
        except Exception as error:
            report[name] = f"failed: {error!r}"
        print(name, json.dumps(report[name], ensure_ascii=False)[:1500], flush=True)
        args.report.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")

    def spoken() -> dict:
        main_model = Answerer(folder / "main")
        heads = {k: v.to(main_model.device) for k, v in load_file(folder / "medusa/model.safetensors").items()}
        draft = AutoModelForCausalLM.from_pretrained(folder / "draft", dtype=torch.bfloat16).to(main_model.device)
        return speculation(main_model, draft, heads, min(args.count, 60))

    def seeing_text() -> dict:
        from transformers import LlavaForConditionalGeneration

        model = LlavaForConditionalGeneration.from_pretrained(folder / "vlm", dtype=torch.bfloat16)
        return text_gates(folder / "vlm", args.count, model)

    parts = {
        "speculation": spoken,
        "lora": lambda: adapters(folder, args.count),
        "vision": lambda: seeing(folder / "vlm", args.count * 5 // 2),
        "moe": lambda: text_gates(folder / "moe", args.count),
        "vlm_text": seeing_text,
        "draft_text": lambda: text_gates(folder / "draft", args.count),
    }
    for name in args.parts.split(",") if args.parts else parts:
        note(name, parts[name])


if __name__ == "__main__":
    main()
