"""What test_engine_families.py and other tests share."""

from __future__ import annotations

import os
from typing import Any

import torch
from tests.cpu.engine.engines import BACKENDS, USUAL, check_nothing_left, exact, greedy, open_llm, run
from tests.cpu.models.families_helpers import CASES
from tests.cpu.models.family_cases import Case
from tests.cpu.models.llama_helpers import CONFIGS
from tests.cpu.models.parity import theirs

ALL = {**{name: Case(config) for name, config in CONFIGS.items()}, **CASES}
FULL = bool(os.environ.get("TOKENMILL_FAMILIES"))
NEW = 64 if FULL else 28
LENGTHS = (30, 3, 45, 17, 2, 25, 9, 21)
ONE_OF_EACH = ("llama", "mistral-window", "qwen2", "qwen3", "qwen3-moe", "mixtral", "gemma2", "gemma3", "phi3", "gpt2",
               "opt", "bloom", "falcon-7b", "gpt-neox", "deepseek-v2", "gpt-oss")  # fmt: skip
APART = ONE_OF_EACH if FULL else ("llama", "mixtral", "deepseek-v2")
"""Those whose engine runs in a process of its own, too: what is sent does not depend on the family."""
HERE = [(name, BACKENDS[-1]) for name in ALL] + [(name, BACKENDS[0]) for name in (ALL if len(APART) > 3 else APART)]
"""All through the native kernels; the reference is compared with Transformers for all of them in tests/cpu/models."""


def prompts_for(vocab: int) -> list[list[int]]:
    source = torch.Generator().manual_seed(7)
    return [torch.randint(0, vocab, (n,), generator=source).tolist() for n in LENGTHS]


class Family:
    """One saved model, its prompts and parameters."""

    def __init__(self, case: Case, folder: Any, new: int = NEW) -> None:
        self.folder = folder
        self.reference, config, _ = case.make(folder)
        self.limit = case.longest or 128
        self.prompts = prompts_for(config.get("text_config", config)["vocab_size"])
        self.params = [greedy(min(new, self.limit - len(p)), logprobs=4, prompt_logprobs=2) for p in self.prompts]

    def open(self, **options: Any) -> Any:
        return open_llm(self.folder, skip_tokenizer_init=True, max_model_len=self.limit, **options)

    def check(self, prompt: list[int], output: Any) -> None:
        """Logprobs within 1e-4 of Transformers', and its greedy ids (but for ties that 1e-4 could turn)."""
        tokens = output.outputs[0].token_ids
        logits = theirs(self.reference, prompt + tokens[:-1])
        expected = logits.log_softmax(-1)
        rows = output.prompt_logprobs[1:] + output.outputs[0].logprobs
        assert len(rows) == len(expected), (len(rows), len(expected))
        for row, line in zip(rows, expected, strict=True):
            for token, entry in row.items():
                assert abs(entry.logprob - line[token].item()) <= 1e-4
        best = expected[len(prompt) - 1 :]
        chosen = best.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (best.amax(-1) - chosen).max() < 1e-4
        assert len(set(tokens)) > 1 or loops(best)


def loops(best: torch.Tensor) -> bool:
    """A random model may say one token for ever: then Transformers says so too."""
    return len(set(best.argmax(-1).tolist())) == 1


def same(left: list[Any], right: list[Any]) -> None:
    for a, b in zip(left, right, strict=True):
        assert exact(a) == exact(b)


def cold(params: list[Any]) -> list[Any]:
    """The same without prompt logprobs, so that the prefix cache is read."""
    import msgspec

    return [msgspec.structs.replace(p, prompt_logprobs=None) for p in params]


def without_prompt(outputs: list[Any]) -> list[Any]:
    return [exact(o)[:-1] for o in outputs]


def five_modes(family: Family, backend: str) -> None:
    """One alone, a mixed batch, prefix hits; and chunks of seven tokens with preemption."""
    with family.open(kernels=backend) as llm:
        batch = run(llm, family.prompts, family.params)
        for prompt, output in zip(family.prompts, batch, strict=True):
            family.check(prompt, output)
        same(run(llm, family.prompts[:1], family.params[0]), batch[:1])  # plain: one alone
        hit = run(llm, family.prompts, cold(family.params))
        assert sum(o.num_cached_tokens > 0 for o in hit) >= 3
        assert without_prompt(hit) == without_prompt(batch)
        check_nothing_left(llm.engine)
        pools = [pool for pool, _ in llm.built.facts.groups]
    tight = 8 * max(pools.count(p) for p in pools) + 3  # one longest sequence and a little
    with family.open(kernels=backend, long_prefill_token_threshold=7, num_blocks=tight) as llm:  # chunks, preemption
        same(run(llm, family.prompts, family.params), batch)
        assert llm.engine.scheduler.counters.preemptions > 0
        check_nothing_left(llm.engine)


def own_process(family: Family) -> None:
    """The same bytes from a process of its own."""
    with family.open(kernels=USUAL) as llm:
        batch = run(llm, family.prompts[:4], family.params[:4])
    with family.open(kernels=USUAL, executor="process", threads=1, max_num_batched_tokens=40) as llm:
        assert llm.engine.executor.depth == 2
        same(run(llm, family.prompts[:4], family.params[:4]), batch)
        check_nothing_left(llm.engine)
