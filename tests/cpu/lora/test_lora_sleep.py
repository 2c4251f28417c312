"""Adapters stay while their model sleeps."""

from __future__ import annotations

import shutil
from concurrent import futures

import pytest
from safetensors.torch import load_file, save_file
from tests.cpu.engine.engines import BACKENDS, exact, greedy, open_llm, run

from tokenmill.core.errors import BusyError
from tokenmill.core.params import LoRARequest
from tokenmill.device import host_pages
from tokenmill.testing.tiny import make_tiny

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


@pytest.mark.parametrize("level", [1, 2])
def test_an_adapter_is_fitted_to_weights_that_are_there(level, base, adapters, monkeypatch, tmp_path):
    """DoRA reads the base: not while it sleeps, and anew when its own numbers come back after an update."""
    monkeypatch.setattr(host_pages, "LEAST_BYTES", 4096)
    dora, prompts = LoRARequest("a7", 1, str(adapters["a7"])), [{"prompt_token_ids": PROMPTS[0]}]
    options = {"enable_sleep_mode": True, "enable_lora": True, "kernels": BACKENDS[-1]}

    def said(llm):
        return [exact(o) for o in llm.generate(prompts, greedy(8, logprobs=1), use_tqdm=False, lora_request=dora)]

    with open_llm(base, **options) as llm:
        wanted = said(llm)
    with open_llm(base, **options) as llm:
        number = llm.built.adapters.note(dora)
        llm.built.adapters.begin(number)  # it is being read while the model falls asleep
        for known in (True, False):
            llm.sleep(level)
            if not known:
                llm.built.adapters.forget_fits()
            with pytest.raises(BusyError, match="the model sleeps"):
                said(llm)
            llm.wake_up()
            assert said(llm) == wanted
        if level == 2:
            other = make_tiny(tmp_path / "other", hidden=128, heads=4, kv_heads=2, architecture="llama", seed=9)
            llm.update_weights(load_file(other / "model.safetensors"))
            assert said(llm) != wanted
            llm.sleep(level)
            llm.wake_up()
            assert said(llm) == wanted
            llm.update_weights(load_file(other / "model.safetensors"))
            llm.sleep(level)  # nobody has asked for it since the update
            llm.wake_up()
            assert said(llm) == wanted


def test_what_was_read_before_an_update_is_read_again(base, adapters, tmp_path):
    dora, prompts = LoRARequest("a7", 1, str(adapters["a7"])), [{"prompt_token_ids": PROMPTS[0]}]
    other = make_tiny(tmp_path / "other", hidden=128, heads=4, kv_heads=2, architecture="llama", seed=9)

    def said(llm):
        return [exact(o) for o in llm.generate(prompts, greedy(8, logprobs=1), use_tqdm=False, lora_request=dora)]

    with open_llm(other, enable_lora=True) as llm:
        wanted = said(llm)
    with open_llm(base, enable_lora=True) as llm:
        llm.built.adapters.begin(llm.built.adapters.note(dora))
        futures.wait(llm.engine.executor.runner.adapters.reading.values())
        llm.update_weights(load_file(other / "model.safetensors"))
        assert said(llm) == wanted


def test_an_adapter_of_an_absorbed_matrix_follows_new_weights(tmp_path):
    """Latent attention keeps kv_b_proj in another form; what adapters are worked into is the matrix itself."""
    from tests.cpu.lora.making import write_adapter
    from tests.cpu.models.family_cases import FIRST

    FIRST["YoutuForCausalLM"].make(tmp_path / "base")
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    other = {name: tensor * 1.5 if "kv_b_proj" in name else tensor for name, tensor in tensors.items()}
    shutil.copytree(tmp_path / "base", tmp_path / "other")
    save_file(other, tmp_path / "other" / "model.safetensors", {"format": "pt"})
    request = LoRARequest("a", 1, str(write_adapter(tmp_path / "a", tmp_path / "base", modules=("kv_b_proj",))))
    prompts, options = [{"prompt_token_ids": PROMPTS[0]}], {"skip_tokenizer_init": True, "max_model_len": 64}

    def said(llm):
        return [[exact(o) for o in llm.generate(prompts, greedy(8, logprobs=1), use_tqdm=False, lora_request=each)]
                for each in (request, None)]  # fmt: skip

    with open_llm(tmp_path / "other", enable_lora=True, **options) as llm:
        wanted = said(llm)
    with open_llm(tmp_path / "base", enable_lora=True, **options) as llm:
        before = said(llm)
        assert before[0] != before[1] and before != wanted
        llm.update_weights(other)
        assert said(llm) == wanted
        llm.update_weights(tensors)
        assert said(llm) == before
