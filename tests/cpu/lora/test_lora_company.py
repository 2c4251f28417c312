"""Adapters beside each other: a row's bytes do not depend on whose adapters its company has, on either backend, in four
formats; and with what else an engine can do: chunks, prefix hits, preemption, drafts, grammars, n, beams, 8 bit K/V."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.cpu.engine.engines import BACKENDS, greedy, open_llm
from tests.cpu.lora.lora_company_helpers import ON, PROMPTS, asked, said
from tests.cpu.lora.making import write_adapter
from tests.cpu.models.families_helpers import CASES

from tokenmill import LoRARequest, SamplingParams, UserError


@pytest.mark.parametrize(
    ("backend", "dtype", "form"),
    [
        ("reference", "float32", None),
        *((BACKENDS[-1], *each) for each in (("float32", None), ("bfloat16", None), ("bfloat16", "int8"))),
        (BACKENDS[-1], "float32", "int4"),
    ],
)
def test_each_row_as_if_it_were_alone(
    base: Path, adapters: dict[str, Path], backend: str, dtype: str, form: str | None
) -> None:
    options = {"kernels": backend, "dtype": dtype, "quantization": form, "enable_prefix_caching": False}
    params = greedy(6, logprobs=2)
    with open_llm(base, **ON, **options) as llm:
        together = said(llm, PROMPTS, params, asked(adapters))
        alone = [said(llm, [p], params, a)[0] for p, a in zip(PROMPTS, asked(adapters), strict=True)]
        assert together == alone
        counters = llm.engine.executor.control({"what": "counters"})["kernels"]
        assert counters["adapt"]["calls"] and not counters["adapt"]["fallbacks"]
    with open_llm(base, max_num_seqs=32, **options) as plain:
        for i in (8, 17):
            assert said(plain, [PROMPTS[i]], params, None)[0] == together[i], "an engine without adapters"
    assert together[0] != said_without(base, options, params)


def said_without(base: Path, options: dict[str, Any], params: Any) -> Any:
    """The first prompt's answer without its adapter."""
    with open_llm(base, **options) as plain:
        return said(plain, PROMPTS[:1], params, None)[0]


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 16},
        {"num_blocks": 8, "max_model_len": 64, "max_num_seqs": 8},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"kv_cache_dtype": "int8"},
        {"max_loras": 2},
        {"max_loras": 1, "max_cpu_loras": 1},
        {"enforce_eager": True},
        {"executor": "process"},
        {"depth": 2},
    ],
    ids=["chunks", "preemption", "drafts", "8 bit K/V", "two slots", "one of everything", "not recorded", "a process",
         "two plans"],
)  # fmt: skip
def test_the_same_with_what_else_there_is(base: Path, adapters: dict[str, Path], options: dict[str, Any]) -> None:
    params = greedy(8, logprobs=1)
    own = {"kv_cache_dtype": options["kv_cache_dtype"]} if "kv_cache_dtype" in options else {}
    with open_llm(base, **{**ON, "kernels": BACKENDS[-1], "enable_prefix_caching": False, **own}) as llm:
        expected = [said(llm, [p], params, a)[0] for p, a in zip(PROMPTS[:12], asked(adapters, 12), strict=True)]
    with open_llm(base, **{**ON, "kernels": BACKENDS[-1], **options}) as llm:
        assert said(llm, PROMPTS[:12], params, asked(adapters, 12)) == expected
        assert said(llm, PROMPTS[:12], params, asked(adapters, 12)) == expected, "cached prefixes"


def test_n_beams_grammars_and_vectors(base: Path, adapters: dict[str, Path]) -> None:
    one, two = asked(adapters)[3], asked(adapters)[4]
    sampled = SamplingParams(n=3, temperature=0.9, seed=5, max_tokens=5, ignore_eos=True)
    beams = SamplingParams(n=2, use_beam_search=True, temperature=0.0, max_tokens=5)
    held = SamplingParams(temperature=0.0, max_tokens=12, structured_outputs={"choice": ["yes", "no", "perhaps"]})
    with open_llm(base, **ON, kernels=BACKENDS[-1]) as llm:
        for params in (sampled, beams, held):
            alone = [said(llm, [PROMPTS[5]], params, each)[0] for each in (one, two, None)]
            assert said(llm, [PROMPTS[5]] * 3, params, [one, two, None]) == alone
            assert params is held or len({str(each) for each in alone}) > 1
        prompt = {"prompt_token_ids": PROMPTS[5]}
        vectors = [llm.embed(prompt, False, lora_request=each)[0].outputs.embedding for each in (one, None, one)]
        together = llm.embed([prompt] * 3, False, lora_request=[one, None, one])
        assert [each.outputs.embedding for each in together] == vectors
        with pytest.raises(UserError, match="2 prompts but 1 adapters"):
            llm.encode([prompt] * 2, use_tqdm=False, lora_request=[one])
        with pytest.raises(UserError, match="one adapter for all texts"):
            llm.score("a", ["b", "c"], use_tqdm=False, lora_request=[one, None])
        assert vectors[0] == vectors[2] != vectors[1]


def test_an_absorbed_matrix_in_company(tmp_path: Path) -> None:
    """Latent attention multiplies by the parts of kv_b_proj, of which each adapter has its own: each row by its own."""
    folder, prompts = tmp_path / "base", [[token % 67 for token in prompt] for prompt in PROMPTS[:4]]
    CASES["deepseek-v2-lite"].make(folder)
    made = [write_adapter(tmp_path / f"a{i}", folder, modules=("kv_b_proj",), seed=i, size=0.5) for i in range(2)]
    one, two = (LoRARequest(path.name, i + 1, str(path)) for i, path in enumerate(made))
    company = [None, one, two, one]
    with open_llm(folder, **ON, kernels=BACKENDS[-1], max_model_len=64, skip_tokenizer_init=True) as llm:
        alone = [said(llm, [p], greedy(6, logprobs=1), each)[0] for p, each in zip(prompts, company, strict=True)]
        llm.reset_prefix_cache()
        assert said(llm, prompts, greedy(6, logprobs=1), company) == alone
        assert said(llm, prompts[1:2], greedy(6, logprobs=1), two) != alone[1:2]


def test_cached_prefixes_belong_to_an_adapter(base: Path, adapters: dict[str, Path]) -> None:
    one, two = asked(adapters)[3], asked(adapters)[4]
    with open_llm(base, **ON) as llm:
        prompt = [{"prompt_token_ids": list(range(5, 69))}]
        counts = [
            llm.generate(prompt, greedy(1), False, lora_request=each)[0].num_cached_tokens
            for each in (one, two, None, one, None)
        ]
    assert counts[:3] == [0, 0, 0]
    assert min(counts[3:]) > 0
