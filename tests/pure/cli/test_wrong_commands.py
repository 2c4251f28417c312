"""What people type who know another program, or who slip: each line gets a sentence or two with the way on."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tokenmill.cli import foreign
from tokenmill.cli.foreign import VERBS
from tokenmill.cli.foreign_bench import BENCH
from tokenmill.cli.verbs import app
from tokenmill.device import named
from tokenmill.server.absent import why_absent

UNREAD = [
    ("merge demo /no/such out", "/no/such: there is no such adapter"),
    ("merge /no/such demo:pirate out", "'/no/such' is neither"),
    ("distill demo out --data /no/such", "--data /no/such cannot be read: No such file"),
    ("distill /no/such out --data /dev/null", "'/no/such' is neither"),
    ("prune demo out --layers 1 --repair /no/such", "--repair /no/such cannot be read"),
    ("prune demo out --layers 1 --calibration /", "--calibration / cannot be read: Is a directory"),
    ("prune /no/such out --layers 1", "'/no/such' is neither"),
    ("quantize demo out --method gptq --calibration /no/such", "--calibration /no/such cannot be read"),
    ("quantize demo out.gguf --format gguf-q4_k --imatrix /no/such", "--imatrix /no/such cannot be read"),
    ("quantize /no/such out", "'/no/such' is neither"),
    ("quality demo --against demo --text /no/such", "--text /no/such cannot be read"),
    ("quality demo --against demo --tasks /no/such", "--tasks /no/such cannot be read"),
]
WRONG = [
    # verbs of others, and slips
    ("run demo", "`tokenmill chat MODEL` talks with a model"),
    ("pull llama3.2", "names without an owner belong to Ollama's own registry"),
    ("quantize demo no-such-out --device cpu", "--device needs --method, such as rtn"),
    ("quantize demo no-such-out --symmetric", "--symmetric needs --method"),
    ("quantize demo no-such-out --samples 3", "--samples needs --method"),
    ("pull demo", "there is nothing to pull"),
    ("pull ./nowhere", "there is no such folder or file"),
    ("pull owner/model:a/b", "a model's name is NAME"),
    ("ls", "`tokenmill list`"),
    ("show nothing", "`tokenmill list` shows what is stored"),
    ("rm ../x", "a model's name is NAME"),
    ("cp nothing mine", "'nothing' not found"),
    ("ps --url ftp://x", "an address like http://127.0.0.1:8000"),
    ("ps --url http://127.0.0.1:9", "(Connection refused); `tokenmill serve MODEL` starts one"),
    ("create mine -f /no/such/Modelfile", "cannot be read: No such file"),
    ("create mine -q q4_K_M", "`tokenmill quantize SRC DST`"),
    ("run-batch -i in.jsonl -o out.jsonl", "`LLM.chat` take a list of prompts"),
    ("collect-env", "`tokenmill doctor`"),
    ("serv demo", "Did you mean serve?"),
    ("genarate", "Did you mean generate?"),
    ("demo", "`tokenmill chat demo` talks with a model"),
    ("./model.gguf", "`tokenmill chat ./model.gguf`"),
    ("serve demo --enable-lora --lora-modules a=/no/such", "/no/such: there is no such adapter"),
    ("serve demo --enable-lora --lora-modules a=/dev/null", "lora_modules: /dev/null: is not a folder"),
    ("serve demo --enable-lora --lora-modules a=/", "has no adapter_config.json"),
    ("serve demo -ngl abc", "-ngl abc cannot be used: it takes a whole number"),
    ("chat demo --n-gpu-layers 1.5", "it takes a whole number, or all or auto"),
    ("frobnicate", "there are serve, chat, generate"),
    ("-m model.gguf -p hi", "A verb comes first"),
    ("--port 8000", "`tokenmill chat --port ...`"),
    ("bench speed", "there are throughput, latency"),
    # llama.cpp's flags
    ("serve -m /no/such.gguf -c 4096 -ngl 99 -t 4 -fa on --jinja -np 2 --metrics", "'/no/such.gguf' is neither"),
    ("chat -m /no/such.gguf --ctx-size 4096 -n 64 --temp 0.5 --no-mmap --mlock -b 512", "'/no/such.gguf' is neither"),
    ("serve --temp 0.7", """'{"temperature": 0.7}'"""),
    ("serve -n 64", '"max_new_tokens": 64'),
    ("serve --lora adapter.gguf", "--lora-modules NAME=FILE"),
    ("serve --mmproj proj.gguf", "pictures and sound are not read"),
    ("serve -md draft.gguf", "--speculative-config"),
    ("chat -ctk q4_0", "--kv-cache-dtype fp8 or int8"),
    ("serve --tensor-split 3,1", "--quantization makes them smaller"),
    ("chat --grammar-file a.gbnf", "structured_outputs"),
    ("serve --rope-freq-base 10000", "--hf-overrides"),
    ("generate -p hi --mirostat 2", "requests may ask for it"),
    ("serve --list-devices", "`tokenmill doctor`"),
    ("chat -c", "here it is called --max-model-len"),
    # vLLM's and Ollama's
    ("serve --nnodes 2 /no/such", "processes of one machine"),
    ("chat --prefill-context-parallel-size 2", "processes of one machine"),
    ("plan demo --data-parallel-size 2 --slo ttft=1s --users 2", "leave out --data-parallel-size"),
    (
        "plan demo --pipeline-parallel-size 2 --data-parallel-size 2 --workload w.json",
        "--data-parallel-size and --pipel",
    ),
    ("plan demo --data-parallel-size 0", "--data-parallel-size must be positive"),
    ("plan demo --enable-expert-parallel", "over the ranks of --tensor-parallel-size, which is 1"),
    ("plan demo --enable-expert-parallel --tp 2 --slo ttft=1s --users 2", "leave out --enable-expert-parallel"),
    ("generate /no/such -p hi --tensor-parallel-size 1 --swap-space 4 --disable-log-requests", "'/no/such' is neither"),
    ("chat --enable-prompt-adapter", "prompt adapters are not built"),
    ("serve --cpu-offload-gb 10", "--quantization makes them smaller"),
    ("chat demo --format json", "response_format"),
    ("chat --insecure", "TLS"),
    # slips in flags and values
    ("chat --port 8000", "It is a flag of serve"),
    ("chat --prompt hi", "It is a flag of generate"),
    ("serve --max-model-length 4096", "Did you mean --max-model-len?"),
    ("serve --quantisation int8", "Did you mean --quantization?"),
    ("serve --foo", "`tokenmill serve --help-all` lists the flags"),
    ("serve --dtype float12", "'--dtype'"),
    ("serve --port eighty", "'--port'"),
    ("serve --port", "'--port' requires an argument"),
    ("serve --port 99999", "port must be at most 65535"),
    ("serve --hf-overrides {", "takes JSON"),
    ("chat demo tell me", "unexpected extra argument"),
    ("generate demo", "--prompt TEXT"),
    ("generate demo -p hi --temperature hot", "'--temperature'"),
    ("quantize", "Missing argument 'SRC'"),
    ("quantize demo /tmp/x --format int3", "'--format'"),
    ("tune demo", "tune needs --slo and --users, or --kernel-search load"),
    ("tune demo --kernel-search load --device cpu", "this engine runs on cpu"),
    ("tune demo --kernel-search load --users 3", "--users has no effect with --kernel-search"),
    ("tune demo --kernel-search load --trial-seconds 3", "--trial-seconds has no effect with --kernel-search"),
    ("plan demo --device h200 --measure", "--measure measures this machine, and --device h200 is another"),
    ("plan demo --slo ttft=1s", "--slo and --users belong together"),
    ("plan /no/such/model --device h200", "'/no/such/model' is neither"),
    ("completion tcsh", "bash"),
    ("completion", "Missing argument 'bash|zsh|fish'"),
    ("chat demo --chat-template /no/such", "cannot be read"),
    ("serve demo --api-key ''", "--api-key is empty"),
    ("serve -p 8080", "--port N is the port"),
    ("serve demo 8080", "8080 is not a model's name; did you mean --port 8080?"),
    ("serve demo /no/such", "'/no/such' is neither"),
    ("serve --reload", "`tokenmill serve --help-all` lists the flags"),
    ("serve --workers 4", "--engines N starts more engines"),
    ("serve --load-in-4bit /no/such --context-length 4096 --num-gpu 1", "'/no/such' is neither"),
    ("generate demo -p hi --stream false", "a switch takes no value"),
    ("generate demo hello", "the text stands behind --prompt, in quotes"),
    ("generate /no/such -p hi --max_new_tokens 5", "'/no/such' is neither"),
    ("generate demo -p hi --num-beams 4", "use_beam_search"),
    ("bench throughput demo --dataset sharegpt.json", "--workload FILE"),
    ("plan /no/such --gpu h100", "'/no/such' is neither"),
    ("doctor demo", "`tokenmill doctor --help` explains it"),
    ("serve --cors '*' --port x", "'--port'"),
    ("serve --max_model_len 1,000", "takes a whole number, not 1,000"),
    ("serve --ctx_size nine", "'--ctx_size': --ctx_size takes a whole number"),
    ("bench latency demo --batch-size 0", "'--batch-size'"),
    ("bench throughput demo --batch-size 0", "--batch-size must be positive"),
    ("bench throughput demo -tp 0", "-tp must be positive"),
    ("bench serve demo", "must begin with http"),
    ("bench serve http://127.0.0.1:9 --request-rate -1", "--request-rate must be above 0"),
    ("bench throughput demo --num-prompts 1000000 --input-len 99999", "ask for fewer requests"),
    ("serve demo --port=99999", "--port must be at most 65535"),
    ("serve demo --max-model-len 1", "--max-model-len must be at least 2, a token of the prompt and one"),
    ("generate demo -p hi -n 0", "-n must be in [1,"),
    ("serve --kv-cache-memory-bytes lots", "32k and 2GiB are allowed"),
    ("serve --max-num-seqs", "'--max-num-seqs' requires an argument"),
    ("-v", "`tokenmill --version` prints the version"),
    ("doctor --device cuda", "--device needs --measure"),
    ("pull https://example.com/m.gguf", "Download the file, and pull it by its path"),
    ("create mine", "-f FILE names the Modelfile"),
    ("quality /no/such --against demo", "'/no/such' is neither"),
    ("plan demo --slo ttft=fast --users 5", "--slo takes terms such as ttft=500ms"),
]
ON_DEVICES = [
    *("serve demo", "generate demo -p a", "chat demo", "bench latency demo", "bench throughput demo", "tune demo"),
    *("quantize demo out", "quality demo --against demo", "prune demo out --layers 1", "doctor --measure"),
    "distill demo out --data /dev/null",
]
SENTENCE = re.compile(r"[.?!](?:\s|$)")


@pytest.mark.parametrize(("line", "said"), UNREAD)
def test_paths_that_are_not_there_are_told_before_anything_is_imported(
    line: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.startswith(("tokenmill.measure", "tokenmill.quantize"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    result = CliRunner().invoke(app, shlex.split(line))
    assert result.exit_code == 2 and said in " ".join(result.output.split()), (result.output, result.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("line", ON_DEVICES)
@pytest.mark.parametrize(("device", "said"), [
    ("gpu", "Unknown device 'gpu'"), ("cuda:x", "Unknown device 'cuda:x'"), ("cuda", "No NVIDIA or AMD GPU can be"),
    ("cuda:1", "No NVIDIA or AMD GPU"), ("mps", "No device of kind mps"), ("xpu", "No device of kind xpu"),
])  # fmt: skip
def test_devices_that_are_not_there_are_told_before_anything_is_imported(
    line: str, device: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(named, "DEV", tmp_path)
    monkeypatch.setattr(named.sys, "platform", "linux")
    monkeypatch.setitem(sys.modules, "torch", None)
    result = CliRunner().invoke(app, [*line.split(), "--device", device])
    assert result.exit_code == 2 and said in result.stderr.splitlines()[-1], (result.output, result.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["auto", "cpu", "hpu", "cuda", "cuda:3"])
def test_other_devices_are_left_to_torch(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(named, "DEV", tmp_path)
    named.check_device(name)


@pytest.mark.parametrize(("line", "hint"), WRONG, ids=[line for line, _ in WRONG])
def test_wrong_commands_are_told_the_way(line: str, hint: str) -> None:
    result = CliRunner().invoke(app, shlex.split(line))
    assert isinstance(result.exception, SystemExit), result.exception
    # `serve` says what it does meanwhile; the answer is the last line.
    told = result.stderr.rstrip().splitlines()[-1]
    assert result.exit_code == 2 and result.stdout == ""
    assert told.startswith("tokenmill: ") and hint in told and "Traceback" not in result.stderr
    assert len(SENTENCE.findall(told)) <= 3 and len(told) < 400, told


@pytest.mark.parametrize(
    "line",
    [
        *(
            "serve --hf-overrides DEEP",
            "serve --opening DEEP",
            "serve --speculative-config DEEP",
            "serve --config FILE",
        ),
        *("serve --models FILE", "serve --lora-modules DEEP", "serve --default-chat-template-kwargs DEEP"),
        *("bench throughput demo --workload FILE", "plan demo --workload FILE", "chat --eplb-config DEEP"),
    ],
)
def test_json_without_end_is_no_json(line: str, tmp_path: Path) -> None:
    deep, file = '{"name":' * 40_000, tmp_path / "deep.json"
    file.write_text("[" * 40_000)
    result = CliRunner().invoke(app, [{"DEEP": deep, "FILE": str(file)}.get(word, word) for word in line.split()])
    assert isinstance(result.exception, SystemExit) and result.exit_code == 2, result.exception
    assert len(result.stderr.splitlines()[-1]) < 600 and "Traceback" not in result.stderr


def test_other_programs_flags_have_an_effect_are_told_or_are_listed() -> None:
    silent = {name for names in foreign.HARMLESS.values() for name in names.split()}
    for name, other in [*foreign.LLAMA.items(), *BENCH.items()]:
        if other.into == "" and not other.values:
            assert bool(other.note) != (name in silent), name
        else:
            assert other.into or other.why or other.values, name
        assert name not in silent or (other.into, other.why, other.note) == ("", "", ""), name


@pytest.mark.parametrize("line", ["--keepalive 5m", "--numa=distribute", "--mlock", "-tb 4"])
def test_what_has_no_effect_is_told(line: str) -> None:
    told = CliRunner().invoke(app, ["chat", "/no/such", *line.split()]).stderr
    assert told.startswith(f"note: {re.split('[ =]', line)[0]} has no effect: ")


@pytest.mark.parametrize("line", ["--sleep-idle-seconds -1", "--no-mmap", "-fa on", "--poll 0"])
def test_what_asks_for_nothing_is_no_news(line: str) -> None:
    assert "has no effect" not in CliRunner().invoke(app, ["chat", "/no/such", *line.split()]).stderr


@pytest.mark.parametrize("name", BENCH)
def test_flags_of_vllm_bench_are_read_or_told_what_to_give(name: str) -> None:
    """In the verbs that lack a flag of that name, with and without a value."""
    verbs = vars(vars(typer.main.get_command(app))["commands"]["bench"])["commands"]
    for verb in ("throughput", "latency", "serve"):
        if name in {each for param in verbs[verb].params for each in param.opts}:
            continue
        for value in ([], ["7"]):
            told = CliRunner().invoke(app, ["bench", verb, "/no/such", name, *value]).stderr.splitlines()[-1]
            assert "lists the flags" not in told and "Did you mean" not in told, told


def test_a_command_of_vllm_bench_serve_reaches_the_server() -> None:
    line = "--backend vllm --model m --dataset-name random --random-input-len 8 --random-output-len 4 --num-prompts 2"
    for more in ("", "--endpoint /v1/completions --percentile-metrics ttft,tpot --num-warmups 0 --disable-tqdm"):
        result = CliRunner().invoke(app, ["bench", "serve", "http://127.0.0.1:1", *line.split(), *more.split()])
        assert "cannot be reached" in result.stderr, result.stderr


def test_there_are_enough_of_them() -> None:
    assert len({line for line, _ in WRONG}) == len(WRONG) >= 40


def test_paths_that_are_pointed_at_are_there() -> None:
    advice = " ".join([*VERBS.values(), *(str(other) for other in vars(foreign).values())])
    named = set(re.findall(r"(?<![\w.])/(?:v1|api|v2)/[a-z_/]+", advice))
    assert "/v1/embeddings" in named
    assert not {path for path in named if why_absent("POST", path)}
