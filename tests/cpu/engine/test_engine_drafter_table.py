"""Every drafter beside every feature: the same ids and log-probabilities as without drafts, to the last bit.

Rows of the table are (target, drafter, how the engine is pressed); in each of them requests of all kinds run together,
each of which is compared with what it says without drafts. Two of three guesses are made by somebody who knows the
text and now and then lies, so that every request has right guesses and wrong ones; the others are the drafter's own.
`make test` takes each drafter under one pressure, `make test-nightly` the whole product.
"""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.cpu.engine.drafters import make_eagle, make_medusa
from tests.cpu.engine.engines import all_of_them, check_nothing_left, exact, greedy, open_usual, run
from tests.cpu.engine.later_layers import make_checkpoint
from tests.thinned import WHOLE

from tokenmill import LLM, SamplingParams
from tokenmill.testing.tiny import make_tiny

VOCAB, LONGEST, MOST, NODES = 320, 64, 3, 9
SHAPE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0]]
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    "ngram of the device": {"method": "ngram", "prompt_lookup_min": 1},
    "suffix": {"method": "suffix"},
    "lookahead": {"method": "lookahead"},
    "lookahead windows": {"method": "lookahead", "lookahead_window": 3, "lookahead_ngram": 4},
    "draft model": {"method": "draft_model", "model": "other"},
    "draft model with states": {"method": "draft_model", "model": "hybrid 1"},
    "medusa": {"method": "medusa", "model": "medusa"},
    "medusa tree": {"method": "medusa", "model": "medusa", "speculative_token_tree": "best"},
    "medusa fixed tree": {"method": "medusa", "model": "medusa", "speculative_token_tree": SHAPE},
    "eagle": {"method": "eagle", "model": "eagle"},
    "eagle tree": {"method": "eagle", "model": "eagle", "speculative_token_tree": "best"},
    "eagle3": {"method": "eagle3", "model": "eagle3"},
    "eagle3 tree": {"method": "eagle3", "model": "eagle3", "speculative_token_tree": "best"},
    "deep eagle": {"method": "eagle", "model": "deep eagle"},
    "deep eagle3 tree": {"method": "eagle3", "model": "deep eagle3", "speculative_token_tree": "best"},
    "mtp": {"method": "mtp"},
    "mtp tree": {"method": "mtp", "speculative_token_tree": "best"},
    "mtp of two layers": {"method": "mtp"},
}
TREES = [name for name in DRAFTERS if "tree" in name or "windows" in name]
PRESSURES: dict[str, dict[str, Any]] = {
    "none": {},
    "preemption": {"num_gpu_blocks_override": 36},
    "chunks": {"max_num_batched_tokens": 13},
    "plans in flight": {"pipeline_depth": 3},
    "no cache": {"enable_prefix_caching": False},
}
TARGETS = {"plain": list(DRAFTERS), "hybrid": [name for name in DRAFTERS if name not in TREES]}
"""`plain` has attention alone, `hybrid` recurrent layers, too, for which trees are refused."""
CELLS = [(t, d, p) for t, drafters in TARGETS.items() for d in drafters for p in PRESSURES]
FEW = [(t, d, list(PRESSURES)[(i + j) % len(PRESSURES)]) for j, t in enumerate(TARGETS)
       for i, d in enumerate(TARGETS[t]) if not (j and i % 3)]  # fmt: skip

SPEECH = {"regex": "m[ -~]{60}[.]"}
"""Half of the vocabulary may follow, so that wrong guesses are tried, too."""
KINDS: dict[str, SamplingParams] = {
    "greedy": greedy(24),
    "sampled": SamplingParams(temperature=0.8, top_p=0.95, seed=4, max_tokens=22, ignore_eos=True),
    "grammar": SamplingParams(temperature=0.0, max_tokens=34, structured_outputs=SPEECH),
    "grammar, sampled": SamplingParams(temperature=0.9, seed=7, max_tokens=34, structured_outputs=SPEECH, logprobs=1),
    "penalties": greedy(25, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
    "logprobs": greedy(21, logprobs=3, prompt_logprobs=1),
    "stops and bans": SamplingParams(
        temperature=0.8,
        seed=2,
        max_tokens=30,
        min_tokens=14,
        stop_token_ids=list(range(0, VOCAB, 16)),
        logit_bias={7: -100.0, 9: 2.0},
        bad_words=["ab", "e"],
    ),
    "n = 3": SamplingParams(temperature=1.0, n=3, seed=8, logprobs=1, max_tokens=18, ignore_eos=True),
}
STEM = [5, 9, 200, 17, 5, 9, 200, 17, 33, 5, 9, 40, 41, 42, 43, 44, 45]
PROMPTS = [STEM + [50 + i] * i for i in range(len(KINDS))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Targets, by how many layers of theirs guess later tokens, and drafters of their size and vocabulary."""
    root = tmp_path_factory.mktemp("table")
    made = {"other": make_tiny(root / "other", hidden=32, heads=2, kv_heads=1, layers=1, vocab=VOCAB, seed=1)}
    more: dict[str, Any] = {"vocab_size": VOCAB}
    families = {"plain": ("glm4_moe", more | {"num_hidden_layers": 3}), "hybrid": ("qwen3-next", more)}
    for title, later in ((title, later) for title in families for later in (1, 2)):
        made[f"{title} {later}"] = folder = root / f"{title}-{later}"
        folder.mkdir()
        family, changes = families[title]
        make_checkpoint(family, folder, later, **changes)
        for file in made["other"].glob("token*"):
            shutil.copy(file, folder)
    made["medusa"] = make_medusa(root / "medusa", hidden=32, vocab=VOCAB)
    made["eagle"] = make_eagle(root / "eagle", hidden=32)
    made["eagle3"] = make_eagle(root / "eagle3", hidden=32, words=100)
    made["deep eagle"] = make_eagle(root / "deep", hidden=32, layers=2)
    made["deep eagle3"] = make_eagle(root / "deep3", hidden=32, words=100, layers=3)
    return made


def open_target(folders: dict[str, Path], target: str, **options: Any) -> LLM:
    given = {"max_model_len": LONGEST, "block_size": 4, "max_num_seqs": 8, **options}
    return all_of_them(open_usual(folders[target], **given))


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path]) -> Any:
    """What a target says without drafts: nothing else of the table changes a byte."""

    @cache
    def outputs(target: str) -> Any:
        with open_target(folders, target, enforce_eager=True, pipeline_depth=1) as llm:
            return run(llm, PROMPTS, list(KINDS.values()))

    return outputs


class Knowing:
    """Guesses of somebody who has read the answers, in the shape that the drafter chose."""

    def __init__(self, outputs: list[Any]) -> None:
        self.texts = [[*out.prompt_token_ids, *o.token_ids] for out in outputs for o in out.outputs]

    def next(self, tokens: list[int]) -> int | None:
        """What comes behind them; now and then he does not say."""
        if hash(tuple(tokens[-3:])) % 4 == 0:
            return None
        size = len(tokens)
        return next((text[size] for text in self.texts if len(text) > size and text[:size] == tokens), None)

    def chain(self, tokens: list[int], drafts: list[int]) -> list[int]:
        told = list(tokens)
        for own in drafts:
            right = self.next(told)
            told.append(own if right is None else right)
        return told[len(tokens) :]

    def tree(self, tokens: list[int], drafts: list[int], parents: list[int]) -> list[int]:
        """Of each node that is right, one child is, too; of two children none may be the same."""
        made, lines = list(drafts), {0: tokens}
        for node, parent in enumerate(parents):
            if parent not in lines:
                continue
            right, beside = self.next(lines[parent]), [n for n, p in enumerate(parents) if p == parent]
            if right is None or any(made[n] == right for n in beside):
                continue
            at = beside[len(lines[parent]) // 2 % 2 % len(beside)]
            made[at] = right
            if at >= node:
                lines[at + 1] = [*lines[parent], right]
        return made

    def install(self, llm: LLM) -> None:
        host, device = llm.engine.scheduler.roster.drafter, llm.engine.executor.runner.drafter
        honest_host, honest = host.propose, device.propose

        def on_host(seq: Any, most: int) -> list[int]:
            own = honest_host(seq, most)
            return own if len(seq.tokens) % 3 == 0 else self.chain(seq.tokens, (own + [1] * most)[:most])

        def on_device(step: Any) -> None:
            honest(step)
            for row in step.row_list:
                known = int(step.rows.length[row])
                if known % 3 == 0:
                    continue
                tokens = step.rows.tokens[row, : known + step.count].tolist()
                given, drafts = tokens[:known], tokens[known:]
                if device.levels:
                    told = self.tree(given, drafts, step.rows.parents[row, : step.count].tolist())
                else:
                    told = self.chain(given, drafts)
                for i, token in enumerate(told):
                    step.rows.tokens[row, known + i] = token

        host.propose = on_host
        if device.most:
            device.propose = on_device


def drafts_of(name: str, folders: dict[str, Path]) -> dict[str, Any]:
    said = dict(DRAFTERS[name])
    if "model" in said:
        said["model"] = str(folders[said["model"]])
    if name not in ("lookahead windows", "medusa fixed tree"):
        said["num_speculative_tokens"] = NODES if name in TREES else MOST
    more = {"pipeline_depth": 2} if name == "ngram of the device" else {}
    return {**more, "speculative_config": said}


@pytest.mark.parametrize(("target", "name", "pressure"), CELLS if WHOLE else FEW)
def test_no_drafter_changes_a_byte(target: str, name: str, pressure: str, folders: dict[str, Path], plain: Any) -> None:
    """Twice, so that the second time is served by the prefix cache."""
    target += " 2" if name == "mtp of two layers" else " 1"
    wanted = plain(target)
    with open_target(folders, target, **{**drafts_of(name, folders), **PRESSURES[pressure]}) as llm:
        Knowing(wanted).install(llm)
        found = [run(llm, PROMPTS, list(KINDS.values())) for _ in range(2)]
        counters = llm.engine.scheduler.counters
        assert counters.failures == 0
        assert counters.preemptions > 0 or pressure != "preemption"
        assert counters.cached_tokens > 0 or pressure == "no cache"
        while llm.engine.flying:  # planned before the last token was known to be the last
            llm.engine.step()
        check_nothing_left(llm.engine)
    wrong = [
        kind for outputs in found for kind, a, b in zip(KINDS, outputs, wanted, strict=True) if exact(a) != exact(b)
    ]
    assert not wrong
    tried = sum(out.metrics.drafted_tokens for outputs in found for out in outputs)
    right = {kind: sum(outputs[i].metrics.accepted_tokens for outputs in found) for i, kind in enumerate(KINDS)}
    assert tried > sum(right.values()) > 20, (tried, right)
    assert all(right.values()) or pressure == "preemption", right  # heads do not guess for rows that were put aside
