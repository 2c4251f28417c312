"""Every name of vLLM's offline surface is done, harmless or refused, and behaves as its list says."""

from __future__ import annotations

import inspect
import re

import pytest
from tools.compatibility import PAGE, page
from tools.vllm_surface import FIELDS, FLAGS, METHODS, of_field, of_flag
from typer.testing import CliRunner

import tokenmill
from tokenmill.cli.verbs import app
from tokenmill.core.config import GROUPS, SERVER_GROUPS, all_options, make_config, make_server_config, without_secrets
from tokenmill.core.errors import ParameterError
from tokenmill.core.request import SamplingParams
from tokenmill.core.vllm_arguments import ENGINE, SERVER, SWITCHES
from tokenmill.core.vllm_fields import SAMPLING

EXPORTED = {
    "LLM", "LLMEngine", "AsyncLLMEngine", "EngineArgs", "AsyncEngineArgs", "SamplingParams", "PoolingParams",
    "BeamSearchParams", "StructuredOutputsParams", "GuidedDecodingParams", "LoRARequest", "PromptType", "TextPrompt",
    "TokensPrompt", "RequestOutput", "RequestOutputKind", "CompletionOutput", "PoolingOutput", "PoolingRequestOutput",
    "EmbeddingOutput", "EmbeddingRequestOutput", "ClassificationOutput", "ClassificationRequestOutput",
    "ScoringOutput", "ScoringRequestOutput",
}  # fmt: skip
RUN = CliRunner()


def serve(*flags: str) -> str:
    """What `serve` says about these flags, of a model that is not there."""
    done = RUN.invoke(app, ["serve", "/no/such/model", *flags])
    assert done.exit_code != 0
    return re.sub(r"[\s│]+", " ", done.output)


def test_the_package_exports_them():
    assert set(tokenmill.__all__) >= EXPORTED and tokenmill.__all__ == sorted(tokenmill.__all__, key=str)
    for name in tokenmill.__all__:
        assert getattr(tokenmill, name) is not None and name in dir(tokenmill)


def test_methods_are_there_or_say_what_to_use():
    llm = tokenmill.LLM
    for name, verdict in METHODS.items():
        missing = getattr(inspect.getattr_static(llm, name, None), "__doc__", None)
        assert missing is not None or (verdict.kind == "refused" and name in inspect.getmodule(llm).ABSENT), name
        if verdict.kind == "refused" and missing:
            assert missing.startswith("Refused"), name
        assert verdict.kind == "done" or verdict.why


@pytest.mark.parametrize("name", FIELDS)
def test_fields(name):
    verdict = of_field(name)
    if verdict.kind == "harmless":
        assert SamplingParams(**{name: True}) == SamplingParams()
    elif verdict.kind == "refused":
        assert SamplingParams(**{name: None}) == SamplingParams()
        with pytest.raises(ParameterError, match=name):
            SamplingParams(**{name: {"a": 1}})
    lists = (SamplingParams.__struct_fields__, SAMPLING.harmless, SAMPLING.refused)
    assert len([name in one for one in lists if name in one]) <= 1


def test_every_flag_is_on_one_list():
    known = {*all_options(GROUPS), *all_options(SERVER_GROUPS)}
    for flag in FLAGS:
        assert of_flag(flag).kind in ("done", "harmless", "refused")
    names = {flag.replace("-", "_") for flag in FLAGS}
    assert set(SERVER) <= {*names, "prompt_adapters"} and known.isdisjoint(SERVER)
    assert {*ENGINE, *SERVER} >= SWITCHES - {"use_tqdm_on_load"}


def test_flags_are_taken_or_refused_by_the_command():
    """All harmless flags at once reach the model, which is not there; a refused one is named before."""
    harmless, refused = [], []
    for flag in FLAGS:
        name, switch = flag.replace("-", "_"), flag.replace("-", "_") in SWITCHES
        if name in all_options(GROUPS) or name in all_options(SERVER_GROUPS) or name == "config":
            continue
        kind = of_flag(flag).kind
        if kind == "refused" and not (switch and (ENGINE | SERVER)[name].neutral):
            refused.append((name, [f"--{flag}"] if switch else [f"--{flag}", "73"]))
        elif kind == "harmless":
            harmless += [f"--{flag}"] if switch else [f"--{flag}", "73"]
    assert "/no/such/model" in serve(*harmless, "-tp", "1", "-pp", "1", "--max-logprobs", "5")
    for name, flags in refused[::4]:  # each runs a command; the lists themselves are read below
        assert f"{name} = " in (said := serve(*flags)) or f"{name} must be 1" in said, said


@pytest.mark.parametrize("lists", [ENGINE, SERVER], ids=["engine", "server"])
def test_neutral_values_pass_and_others_are_named(lists):
    make = make_config if lists is ENGINE else make_server_config
    for name, other in lists.items():
        for value in (None, *other.neutral):
            assert make(environment={}, **{name: value}) == make(environment={})
        if other.harmless:
            assert make(environment={}, **{name: "anything"}) == make(environment={})
        else:
            with pytest.raises(ParameterError, match=f"^{name} = 'anything' cannot be used: ") as caught:
                make(environment={}, **{name: "anything"})
            assert caught.value.param == name


def test_values_as_programs_write_them():
    import torch

    assert make_config(dtype=torch.bfloat16).model.dtype == "bfloat16"
    assert make_config(quantization="awq_marlin").model.quantization is None
    assert make_config(quantization="int8").model.quantization == "int8"
    assert make_config(kv_cache_dtype="fp8_e4m3").cache.kv_cache_dtype == "fp8"
    assert make_config(served_model_name=["a", "b"]).model.served_model_name == "a,b"
    assert "secret" not in repr(make_config(hf_token="secret"))
    with pytest.raises(ParameterError, match="callable"):
        make_config(hf_overrides=lambda config: config)


def test_parallel_flags_and_other_names():
    for words in (["-pp", "0"], ["--pp", "0"]):
        assert f"{words[0]} must be positive" in serve(*words)
    for words in (["-tp", "0"], ["--tp", "0"], ["--tensor-parallel-size", "0"]):
        assert f"{words[0]} must be positive" in serve(*words)


@pytest.mark.parametrize("verb", [["generate", "-p", "x"], ["chat"], ["bench", "latency"], ["bench", "throughput"]])
def test_other_verbs_read_files_and_the_environment(verb, tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("model: /no/such/folder\nmax-num-seqs: 5\nport: 9\n")
    found = RUN.invoke(app, [*verb, "--config", str(file)])
    assert "/no/such/folder" in found.output and found.exit_code != 0
    assert "/of/mine" in RUN.invoke(app, [*verb, "--model", "/of/mine", "--config", str(file)]).output
    file.write_text("max-num-seqs: many\n")
    assert "max_num_seqs must be a number" in RUN.invoke(app, [*verb, "--config", str(file)]).output
    found = RUN.invoke(app, verb, env={"TOKENMILL_MODEL": "/from/outside"})
    assert "/from/outside" in found.output


def test_llm_reads_a_file_below_its_arguments(tmp_path):
    from tokenmill.core.config_file import DEFAULT_MODEL, with_config_file

    file = tmp_path / "options.yaml"
    file.write_text("model: /no/such/folder\nmax-model-len: 64\nblock-size: 8\napi-key: x\n")
    found = with_config_file({"model": DEFAULT_MODEL, "config": str(file), "block_size": 4})
    assert found == {"model": "/no/such/folder", "max_model_len": 64, "block_size": 4}
    assert with_config_file({"model": "demo", "config": file})["model"] == "demo"
    with pytest.raises(ParameterError, match="path of a YAML file"):
        with_config_file({"config": 3})
    assert isinstance(inspect.signature(tokenmill.LLM.__init__).parameters["model"].default, str)


def test_the_page_is_written_from_the_lists():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tools.compatibility --write"


def test_a_token_is_not_written_into_results():
    assert without_secrets({"hf_token": "hush", "dtype": "auto"}) == {"dtype": "auto"}
