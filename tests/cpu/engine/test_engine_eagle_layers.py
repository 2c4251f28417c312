"""EAGLE heads as they lie on hubs: what they guess is what plain torch makes of their files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cpu.engine.drafters import MOST, make_eagle, make_medusa
from tests.cpu.engine.eagle_reference import Reference
from tests.cpu.engine.engine_draft_models_helpers import PROMPTS
from tests.cpu.engine.engines import all_of_them, exact, greedy, hear_guesses, open_usual, run
from tests.cpu.models.families_helpers import CASES
from torch import Tensor

from tokenmill.core.drafting import AllOfThem
from tokenmill.core.errors import UserError
from tokenmill.testing.tiny import make_tiny

HEADS, WORDS, READS, HIDDEN, VOCAB = 4, 100, (1, 2, 2), 64, 320
LISTED = "eagle_aux_hidden_state_layer_ids"
Config, Tensors = dict[str, Any], dict[str, Tensor]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("eagle") / "target", layers=3)


@pytest.fixture(scope="module")
def whole(target: Path) -> Any:
    hf = pytest.importorskip("transformers")
    return hf.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def wanted(target: Path) -> list[Any]:
    with open_usual(target) as llm:
        return [exact(o) for o in run(llm, PROMPTS[:4], greedy(20))]


def check(head: Path, method: str, target: Path, whole: Any, wanted: list[Any], *ways: dict[str, Any]) -> None:
    """What is said stays the same, and what is guessed is right."""
    tensors = load_file(head / "model.safetensors")
    noisy = {
        n: t + 0.3 * torch.randn_like(t) if t.ndim == 1 and t.is_floating_point() else t for n, t in tensors.items()
    }
    save_file(noisy, head / "model.safetensors")  # norms that are not all one
    config = {"method": method, "model": str(head), "num_speculative_tokens": MOST}
    found: dict[tuple[int, ...], list[int]] = {}
    for more in ways:
        with all_of_them(open_usual(target, speculative_config=config, **more)) as llm:
            hear_guesses(llm, found)
            assert [exact(o) for o in run(llm, PROMPTS[:4], greedy(20))] == wanted
    reference = Reference(whole, head, READS, heads=HEADS)
    texts = sorted(found)[:: max(1, len(found) // 16)]
    right = [found[text] == reference.guesses(list(text), MOST) for text in texts]
    assert len(right) >= 12 and sum(right) >= len(right) - 1, right  # two logits may be one in float32


def rewrite(head: Path, change: Callable[[Config, Tensors], tuple[Config, Tensors]]) -> Path:
    """The same head in another form."""
    said, tensors = json.loads((head / "config.json").read_text()), load_file(head / "model.safetensors")
    said, tensors = change(said, tensors)
    (head / "config.json").write_text(json.dumps(said))
    save_file(tensors, head / "model.safetensors")
    return head


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_what_a_head_guesses(
    method: str, layers: int, target: Path, whole: Any, wanted: list[Any], tmp_path: Path
) -> None:
    head = make_eagle(tmp_path / "head", WORDS if method == "eagle3" else 0, layers=layers, reads=READS)
    check(head, method, target, whole, wanted, {}, {"max_num_batched_tokens": 16, "depth": 2})


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_head_keeps_up_while_nothing_is_guessed(
    method: str, target: Path, whole: Any, wanted: list[Any], tmp_path: Path
) -> None:
    """Depths are measured, none at all, too: rows that decode meanwhile get guesses again, and these are right."""
    head = make_eagle(tmp_path / "head", WORDS if method == "eagle3" else 0, reads=READS)
    config = {"method": method, "model": str(head), "num_speculative_tokens": MOST}
    found: dict[tuple[int, ...], list[int]] = {}
    steps: list[int] = []

    class OnAndOff(AllOfThem):
        def depth(self, rows: int) -> int:
            steps.append(rows)
            return MOST if len(steps) // 4 % 2 else 0

    for more in ({}, {"depth": 2}):
        with open_usual(target, speculative_config=config, **more) as llm:
            llm.engine.scheduler.ahead.control = OnAndOff(MOST)
            hear_guesses(llm, found)
            assert [exact(o) for o in run(llm, PROMPTS[:4], greedy(20))] == wanted
            (again,) = run(llm, [PROMPTS[0] + wanted[0][0][2] + [7]], greedy(12))  # finds the answer's blocks
            assert again.metrics is not None and again.metrics.drafted_tokens > 3
    reference = Reference(whole, head, READS, heads=HEADS)
    late = [text for text in found if len(text) > len(PROMPTS[3]) + 8]
    assert len(late) >= 2
    right = [found[text] == reference.guesses(list(text), MOST) for text in sorted(found)]
    assert len(right) >= 12 and sum(right) >= len(right) - 1, right  # two logits may be one in float32


def in_sglangs(said: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """Layers by their own numbers, and a norm for each."""
    own = {LISTED: [n - 1 for n in said.pop(LISTED)], "use_aux_hidden_state": True, "fc_norm": True}
    return said | {"eagle_config": own}, tensors | {f"fc_norm.{n}.weight": torch.ones(HIDDEN) for n in range(3)}


def in_speculators(said: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """The decoder's fields apart; one norm for all that is read; it goes on from normed states."""
    top = {name: said.pop(name) for name in ("draft_vocab_size", LISTED)}
    top |= {"speculators_model_type": "eagle3", "norm_before_fc": True, "norm_output": True, "fc_norm": False}
    renamed = {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
    renamed |= {"input_norm.weight": torch.ones(3 * HIDDEN), "embed_tokens.weight": torch.randn(VOCAB, HIDDEN)}
    renamed |= {f"layers.0.self_attn.{x}_norm.weight": torch.ones(HIDDEN // HEADS) for x in "qk"}
    return top | {"target_hidden_size": None, "transformer_layer_config": said}, renamed


def sliding(said: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """A layer that sees its newest positions only."""
    return said | {"layer_types": ["sliding_attention"], "sliding_window": 7, "use_sliding_window": True}, tensors


def of_last_states(said: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """ModelOpt's: no layers are read, and the target's head is its head."""
    gone = ("fc.weight", "lm_head.weight", "d2t", "t2d")
    said |= {"draft_vocab_size": None, "eagle_config": {"use_aux_hidden_state": False}}
    return said, {name: value for name, value in tensors.items() if name not in gone}


def with_biases(said: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """Qwen2's heads: biases of q, k and v, and of fc."""
    names = [*(f"layers.0.self_attn.{x}_proj" for x in "qkv"), "fc"]
    more = {f"{name}.bias": torch.randn(tensors[f"{name}.weight"].shape[0]) for name in names}
    return said | {"qkv_bias": True, "bias": True}, tensors | more


FORMS = {"sglang": in_sglangs, "speculators": in_speculators, "sliding": sliding, "last": of_last_states,
         "biases": with_biases}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_the_forms_of_heads(form: str, target: Path, whole: Any, wanted: list[Any], tmp_path: Path) -> None:
    third = form != "biases"
    head = rewrite(make_eagle(tmp_path / "head", WORDS if third else 0, reads=READS), FORMS[form])
    more = {"max_num_batched_tokens": 16} if form == "sliding" else {}
    check(head, "eagle3" if third else "eagle", target, whole, wanted, more)


def test_a_head_with_narrower_states(target: Path, whole: Any, wanted: list[Any], tmp_path: Path) -> None:
    def change(said: Config, tensors: Tensors) -> tuple[Config, Tensors]:
        more = {"fc.weight": torch.randn(32, 3 * HIDDEN) * 0.1, "embed_tokens.weight": torch.randn(VOCAB, 32)}
        return said | {"target_hidden_size": HIDDEN}, tensors | more

    head = rewrite(make_eagle(tmp_path / "head", WORDS, hidden=32, reads=READS), change)
    check(head, "eagle3", target, whole, wanted, {})
    config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": MOST}
    with all_of_them(open_usual(target, speculative_config=config, load_format="dummy")) as llm:
        (out,) = run(llm, PROMPTS[:1], greedy(9))
        assert out.metrics is not None and out.metrics.drafted_tokens > 3


def reordered(said: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """As many words as the model has, in another order."""
    return said, tensors | {"d2t": torch.arange(VOCAB - 1, -VOCAB, -2)}


def in_order(said: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    return said, tensors | {"d2t": torch.zeros(VOCAB, dtype=torch.int64)}


@pytest.mark.parametrize("change", [reordered, in_order])
def test_what_words_mean_counts_whatever_their_number(
    change: Any, target: Path, whole: Any, wanted: list[Any], tmp_path: Path
) -> None:
    head = rewrite(make_eagle(tmp_path / "head", VOCAB, reads=READS), change)
    check(head, "eagle3", target, whole, wanted, {})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda said, tensors: (said | {"draft_vocab_size": None}, {n: t for n, t in tensors.items() if n[:2] != "lm"}),
         "d2t' has shape"),
        (lambda said, tensors: (said, tensors | {"d2t": torch.full((WORDS,), VOCAB)}), "d2t leads to words"),
        (lambda said, tensors: (said, tensors | {"d2t": tensors["d2t"].to(torch.float8_e4m3fn)}), "as float8_e4m3fn"),
        (lambda said, tensors: (said, tensors | {"d2t": tensors["d2t"].half()}), "d2t is stored as float16"),
        (lambda said, tensors: (said, {n: t for n, t in tensors.items() if n != "d2t"}), "needs d2t"),
        (lambda said, tensors: (said | {"target_hidden_size": 32}, tensors), "hidden states of 32 numbers"),
        (lambda said, tensors: (said | {"norm_before_fc": True, "fc_norm": True}, tensors), "exclude each other"),
        (lambda said, tensors: (said | {"norm_before_fc": True}, tensors), "input_norm"),
        (lambda said, tensors: (said | {"speculators_model_type": "dflash"}, tensors), "'dflash'"),
        (lambda said, tensors: (said | {LISTED: [0, 1, 2]}, tensors), "not among"),
        (lambda said, tensors: (said | {"eagle_config": {LISTED: [3]}}, tensors), "not among"),
        (lambda said, tensors: (said | {"layer_types": ["linear_attention"]}, tensors), "layer_types"),
        (lambda said, tensors: (said | {"vocab_size": 9000}, tensors), "a vocabulary of 9000; the model has 320"),
        (lambda said, tensors: (said | {"vocab_size": ["a"]}, tensors), "vocab_size"),
        (lambda said, tensors: (said | {"rms_norm_eps": -1.0}, tensors), "rms_norm_eps"),
        (lambda said, tensors: (said | {"quantization_config": {"quant_method": "x"}}, tensors), "quantised with 'x'"),
    ],
)  # fmt: skip
def test_heads_that_are_refused(change: Any, why: str, target: Path, tmp_path: Path) -> None:
    head = rewrite(make_eagle(tmp_path / "head", WORDS, reads=READS), change)
    with pytest.raises(UserError, match=why) as told:
        open_usual(target, speculative_config={"method": "eagle3", "model": str(head)})
    assert str(head) in str(told.value)  # of two folders, this one


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_words_narrower_than_states_are_refused(method: str, tmp_path: Path) -> None:
    """Such heads read the target's embeddings, and these are OPT-350M's."""
    CASES["opt-350m"].make(tmp_path / "target")
    head = make_eagle(tmp_path / "head", 50 if method == "eagle3" else 0, hidden=32)
    said = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(said | {"vocab_size": 67}))
    config = {"method": method, "model": str(head), "num_speculative_tokens": MOST}
    with pytest.raises(UserError, match="states of 32 numbers, and they have 16"):
        open_usual(tmp_path / "target", speculative_config=config, skip_tokenizer_init=True, max_model_len=64)


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "draft_model"])
def test_damaged_weights_of_a_drafter_are_told(kind: str, target: Path, tmp_path: Path) -> None:
    """They change no answer, and cost time for nothing."""
    made: dict[str, Any] = {"eagle3": lambda at: make_eagle(at, WORDS, reads=READS), "medusa": make_medusa}
    head = made.get(kind, make_tiny)(tmp_path / "head")
    tensors = load_file(head / "model.safetensors")
    hurt = min(name for name, tensor in tensors.items() if tensor.is_floating_point())
    tensors[hurt].view(-1)[0] = math.nan
    save_file(tensors, head / "model.safetensors")
    config = {"method": kind, "model": str(head), "num_speculative_tokens": MOST}
    with open_usual(target, speculative_config=config) as llm:
        assert any("the drafter" in each and hurt in each for each in llm.built.facts.reasons)
    with pytest.raises(UserError, match=f"damaged: {hurt}"):
        open_usual(target, speculative_config=config, check_weights=True)


def test_a_layer_that_is_not_there(target: Path, tmp_path: Path) -> None:
    head = make_eagle(tmp_path / "head", layers=2)
    said = json.loads((head / "config.json").read_text())
    config = {"method": "eagle", "model": str(head), "num_speculative_tokens": MOST}
    for count, why in ((3, "layers.2"), (1, "layers.1"), (0, "num_hidden_layers")):
        (head / "config.json").write_text(json.dumps(said | {"num_hidden_layers": count}))
        with pytest.raises(UserError, match=why):
            open_usual(target, speculative_config=config)


@pytest.mark.parametrize("asked", ["eagle", "eagle3", "medusa", "draft_model"])
def test_heads_of_another_kind(asked: str, target: Path, tmp_path: Path) -> None:
    """What a folder holds is told by its config and its tensors."""
    made = {
        "eagle": make_eagle(tmp_path / "eagle"),
        "eagle3": make_eagle(tmp_path / "eagle3", WORDS, reads=READS),
        "medusa": make_medusa(tmp_path / "medusa"),
    }
    other = rewrite(make_eagle(tmp_path / "other", WORDS, reads=READS), in_speculators)
    for kind, head in [*made.items(), ("eagle3", other)]:
        if kind != asked:
            with pytest.raises(UserError, match=f'say "method": "{kind}"'):
                open_usual(target, speculative_config={"method": asked, "model": str(head)})


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_layers_that_pass_on_several_states(method: str, tmp_path: Path) -> None:
    """The last one joins them, so heads that read it alone work."""
    hf = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "head_dim": 16,
    }
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size_per_layer_input": VOCAB, "laurel_rank": 4}
    sizes |= {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0] * 4}
    sizes |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "max_position_embeddings": 512}
    config = hf.Gemma3nTextConfig(**sizes, pad_token_id=0)
    hf.Gemma3nForCausalLM(config).save_pretrained(tmp_path / "target")
    head = make_eagle(tmp_path / "head", WORDS if method == "eagle3" else 0, reads=READS)
    guessed = {"speculative_config": {"method": method, "model": str(head), "num_speculative_tokens": MOST}}
    if method == "eagle3":
        with pytest.raises(UserError, match="layers of this model pass on 4 states side by side"):
            open_usual(tmp_path / "target", skip_tokenizer_init=True, **guessed)
        return
    said = []
    for more in ({}, guessed):
        with open_usual(tmp_path / "target", skip_tokenizer_init=True, **more) as llm:
            said.append([exact(o) for o in run(llm, PROMPTS[:2], greedy(8))])
    assert said[0] == said[1]
