"""Adapters stay while their model sleeps."""

from __future__ import annotations

from engines import BACKENDS, exact, greedy, open_llm, run

from tokenmill.core.params import LoRARequest
from tokenmill.device import host_pages

PROMPTS = [[1, 2, 3], [4, 5] * 12]


def test_answers_are_those_of_before(base, adapters, monkeypatch):
    monkeypatch.setattr(host_pages, "LEAST_BYTES", 4096)
    wanted = LoRARequest("a2", 1, str(adapters["a2"]))
    prompts = [{"prompt_token_ids": each} for each in PROMPTS]
    with open_llm(base, enable_sleep_mode=True, enable_lora=True, kernels=BACKENDS[-1]) as llm:

        def said():
            adapted = llm.generate(prompts, greedy(8, logprobs=2), use_tqdm=False, lora_request=wanted)
            return [exact(each) for each in (*adapted, *run(llm, PROMPTS, greedy(8, logprobs=2)))]

        before = said()
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert said() == before
