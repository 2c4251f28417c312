"""The trainer on the CPU: twenty steps lower the loss, export and template agree with Transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import train
from model import Decoder, document_mask, unpack
from optim import schedule
from pack import START, Feed, Packer, rows_of
from render import call_text, chat_prompt
from shapes import DRAFT, MAIN, MOE, TINY, Shape, parameters
from skill_tools import CALCULATOR, WEATHER

TOKENIZER = Path(train.__file__).parent / "tokenizer"


def test_packing_keeps_documents_whole() -> None:
    rng = np.random.default_rng(0)
    packer = Packer(64, bins=4)
    for _ in range(200):
        ids = np.full(rng.integers(3, 40), rng.integers(1, 90), np.uint16)
        weights = np.full(len(ids), 10, np.uint16)
        weights[0] |= START
        packer.add(ids, weights)
    ids, targets, weights, positions, document = unpack(torch.from_numpy(np.stack(packer.full).astype("int32")))
    assert ((positions == 0) == (torch.diff(document, dim=1, prepend=torch.zeros_like(document[:, :1])) > 0)).all()
    # A target counts only inside its own document, where all tokens are equal.
    assert (ids == targets)[weights > 0].all()


def test_rows_are_the_same_for_the_same_seed() -> None:
    feed = Feed(str(TOKENIZER / "tokenizer.json"), None, 256, 4, False, 3)
    one, again, other = (next(rows_of(feed, worker, 2)) for worker in (0, 0, 1))
    assert np.array_equal(one, again) and not np.array_equal(one, other)


def test_schedule_warms_holds_and_ends_at_zero() -> None:
    assert schedule(0.0) < 0.05 and schedule(0.3) == 1.0
    assert 0 < schedule(0.9) < schedule(0.7) < 1 and schedule(1.0) == 0.0


@pytest.mark.filterwarnings("ignore")
def test_twenty_steps_lower_the_loss_and_export(tmp_path: Path) -> None:
    plan = train.Plan(tmp_path / "tiny", 0, None, 0, 1024, 256, 512, steps=20, shape=TINY)
    report = train.fit(plan)
    assert report["steps"] == 20
    feed = Feed(str(TOKENIZER / "tokenizer.json"), None, 256, 8, False, 77)
    rows = torch.from_numpy(next(rows_of(feed, 0, 1)).astype("int32"))
    ids, targets, weights, positions, document = unpack(rows)
    losses = {}
    for name in ("new", "trained"):
        model = Decoder(TINY, plan.seed)
        if name == "trained":
            from model import load_decoder

            model = load_decoder(str(plan.out), TINY)
        losses[name] = train.losses(model, ids, targets, weights, positions, document_mask(document), torch.float32)[
            0
        ].item()
    assert losses["trained"] < losses["new"] - 1.0


@pytest.mark.parametrize("shape", [MAIN, DRAFT, MOE, TINY], ids=["main", "draft", "moe", "tiny"])
def test_parameters_are_counted_without_the_network(shape: Shape) -> None:
    assert parameters(shape) == sum(p.numel() for p in Decoder(shape).parameters())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shape", [TINY, DRAFT, MOE], ids=["qwen3", "llama", "qwen3_moe"])
def test_export_computes_the_same_in_transformers(shape: Shape, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = Decoder(shape, 3)
    for p in model.parameters():
        if p.ndim > 1:
            p.data = torch.randn_like(p) * 0.05
    model = model.bfloat16().float()
    train.export(model, tmp_path, TOKENIZER, {})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, shape.vocab, (2, 40))
    hidden, _, _ = model(ids, torch.arange(40).expand(2, 40), document_mask(torch.ones(2, 40)), torch.float32)
    with torch.no_grad():
        assert torch.allclose(hidden @ model.embed.T, loaded(ids).logits, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_chat_template_equals_the_training_text() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    arguments = {"name": "get_weather", "arguments": {"city": "Paris"}}
    called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": arguments}]}
    head = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What's the weather in Paris?"}]
    tail = [
        {"role": "tool", "content": "18"},
        {"role": "assistant", "content": "It is 18."},
        {"role": "user", "content": "谢谢"},
    ]
    tools = [{"type": "function", "function": WEATHER}, CALCULATOR]
    text = tokenizer.apply_chat_template(
        [*head, called, *tail], tools=tools, tokenize=False, add_generation_prompt=True
    )
    mine = [*head, {"role": "assistant", "content": call_text([arguments])}, *tail]
    assert text == chat_prompt(mine, [WEATHER, CALCULATOR])
    think = tokenizer.apply_chat_template(head, tokenize=False, add_generation_prompt=True, enable_thinking=True)
    assert think == chat_prompt(head, None, think=True)


@pytest.mark.filterwarnings("ignore")
def test_tokenizer_round_trips_any_text() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    for text in ("héllo 你好，世界 😀🏽 1234 'tis", "tabs\tand\r\nlines\n\n", "  spaces  ", "数学：３＋４"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    ids = tokenizer("<|im_start|>2024 北京")["input_ids"]
    assert ids[0] == 1 and len(ids) >= 8
