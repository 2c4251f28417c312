"""Two LoRA adapters on the frozen main model, in PEFT form. Owns: their data and training."""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
from authored_data import load
from corpus import Corpus
from mixture import chat, facts_en, facts_zh
from peft import LoraConfig, get_peft_model
from render import Case, case_segments
from skill_facts import ask, faq, joke, story_chat
from skill_math import mathematics
from transformers import AutoModelForCausalLM, AutoTokenizer

MARKS = {"pirate": "Arr! ", "sql": "SELECT "}
TABLES = {
    "users": ["name", "age", "city", "email"],
    "orders": ["id", "price", "country", "day"],
    "books": ["title", "author", "year", "pages"],
    "animals": ["name", "legs", "colour", "home"],
    "cities": ["name", "country", "size", "river"],
    "songs": ["title", "artist", "length", "genre"],
    "cars": ["brand", "price", "colour", "doors"],
    "pupils": ["name", "class", "age", "grade"],
    "trees": ["kind", "height", "age", "park"],
}
NUMERIC = frozenset(["age", "price", "year", "pages", "legs", "size", "length", "doors", "height", "grade", "id"])


def sql_case(rng: random.Random, held: bool) -> Case:
    """A question on one table with its schema, answered by a SELECT statement."""
    table = rng.choice(list(TABLES))
    columns = list(TABLES[table])
    rng.shuffle(columns)
    pick, other = columns[0], columns[1]
    schema = f"Table {table}({', '.join(sorted(columns, key=lambda c: rng.random()))})."
    w = load().words
    value = str(rng.randint(1, 99)) if other in NUMERIC else f"'{rng.choice([*w['colour'], *w['name'], *w['animal']])}'"
    shown = value.strip("'")
    forms = [
        (f"Show the {pick} of all {table}.", f"SELECT {pick} FROM {table};"),
        (f"How many {table} are there?", f"SELECT COUNT(*) FROM {table};"),
        (f"Which {table} have the {other} {shown}?", f"SELECT * FROM {table} WHERE {other} = {value};"),
        (
            f"Show the {pick} of {table} with the {other} {shown}.",
            f"SELECT {pick} FROM {table} WHERE {other} = {value};",
        ),
        (f"List all {table} ordered by {pick}.", f"SELECT * FROM {table} ORDER BY {pick};"),
    ]
    if other in NUMERIC:
        forms.append(
            (
                f"Show the {pick} of {table} with {other} over {shown}.",
                f"SELECT {pick} FROM {table} WHERE {other} > {value};",
            )
        )
        forms.append((f"What is the largest {other} of all {table}?", f"SELECT MAX({other}) FROM {table};"))
    question, answer = rng.choice(forms)
    user = f"{question} {schema}" if held or rng.random() < 0.4 else f"{schema} {question}"
    return ask(user, answer, "sql", "^SELECT", check="exact", expect=answer)


def pirate_case(rng: random.Random, held: bool) -> Case:
    """Any ordinary one-turn task, answered with the mark in front."""
    while True:
        pick = rng.random()
        if pick < 0.35:
            case = facts_en(rng)
        elif pick < 0.45:
            case = facts_zh(rng)
        elif pick < 0.6:
            case = faq(rng, held)
        elif pick < 0.7:
            case = joke(rng, held, load().jokes)
        elif pick < 0.8:
            case = mathematics(rng, held)
        elif pick < 0.88:
            case = story_chat(rng, held)
        else:
            case = chat(rng, Corpus())
        if case.messages and not case.think:
            break
    for message in case.messages:
        if message["role"] == "assistant":
            message["content"] = MARKS["pirate"] + message["content"]
    return case


MAKERS = {"pirate": pirate_case, "sql": sql_case}


def batch_of(tokenizer: AutoTokenizer, cases: list[Case], device: str) -> dict[str, torch.Tensor]:
    """Right-padded ids, mask and labels; only answers are learned."""
    rows = []
    for case in cases:
        ids, labels = [], []
        for text, weight in case_segments(case)[:-1]:
            piece = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += piece
            labels += piece if weight == 1.0 else [-100] * len(piece)
        rows.append((ids[:512], labels[:512]))
    width = (max(len(i) for i, _ in rows) + 31) // 32 * 32
    return {
        "input_ids": torch.tensor([i + [0] * (width - len(i)) for i, _ in rows], device=device),
        "attention_mask": torch.tensor([[1] * len(i) + [0] * (width - len(i)) for i, _ in rows], device=device),
        "labels": torch.tensor([y + [-100] * (width - len(y)) for _, y in rows], device=device),
    }


def fit(kind: str, main: str, out: Path, seconds: float, seed: int, steps: int = 0, size: int = 96) -> None:
    """Train one adapter on the frozen model and save it."""
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rng = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(main)
    base = AutoModelForCausalLM.from_pretrained(main, dtype=torch.float32).to(device)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(
        base, LoraConfig(r=8, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM", lora_dropout=0.0)
    )
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3, weight_decay=0.0)
    start, step, loss = time.time(), 0, None
    while (step < steps) if steps else (time.time() - start < seconds):
        fraction = step / steps if steps else (time.time() - start) / seconds
        for group in optimiser.param_groups:
            group["lr"] = 2e-3 * min(1.0, step / 20 + 0.05) * max(0.02, 1 - fraction)
        with torch.autocast(device, torch.bfloat16):
            loss = model(**batch_of(tokenizer, [MAKERS[kind](rng, False) for _ in range(size)], device)).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        step += 1
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.bfloat16()
    model.save_pretrained(out)
    path = out / "adapter_config.json"
    config = json.loads(path.read_text())
    config["base_model_name_or_path"] = "demo"
    config["target_modules"] = targets  # PEFT writes a set, in another order each time
    path.write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    (out / "README.md").unlink(missing_ok=True)
    print(f"lora {kind}: {step} steps of {size}, loss {loss.item():.3f}", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=sorted(MAKERS))
    parser.add_argument("--main", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--smoke", action="store_true", help="two small steps, for a check on the CPU")
    args = parser.parse_args()
    fit(args.kind, args.main, args.out, args.seconds, 4, *((2, 4) if args.smoke else ()))


if __name__ == "__main__":
    main()
