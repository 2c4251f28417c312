"""What the documents say is so: their code runs, and the files that they name exist."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from tests.cpu.docs.docs_helpers import DOCUMENTS, ROOT, blocks
from typer.testing import CliRunner

from tokenmill import LLM, SamplingParams
from tokenmill.cli.verbs import app
from tokenmill.compute.forward import NormSpec
from tokenmill.core import config
from tokenmill.demo import demo_dir
from tokenmill.engine.options import drafting
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.models import registry
from tokenmill.models.config_fields import FIELDS
from tokenmill.models.multimodal import OUTERS
from tokenmill.quant import detect
from tokenmill.quant.dense import DenseWeight
from tokenmill.server.openai.schemas import ChatRequest
from tokenmill.testing.tiny import make_tiny
from tokenmill.text.messages.families import CALL_FORMATS, THINKING

RUNS = "docs/history/runs-2026-11.md"


def names(document: str, **given: Any) -> dict[str, Any]:
    """The names that a document's Python blocks define."""
    module = types.ModuleType("example")
    module.__dict__.update(given)
    for code in blocks(document):
        exec(compile(code, document, "exec"), module.__dict__)
    return module.__dict__


def test_the_readme_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("README.md")
    if not (demo_dir("main") / "config.json").exists():
        code = code.replace('model="demo"', f"model={str(make_tiny(tmp_path))!r}")
    found: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), found)
    found["llm"].close()
    shown = capsys.readouterr().out
    assert "Once upon a time -> " in shown and "The capital of France is -> " in shown
    assert all(output.outputs[0].token_ids for output in [*found["outputs"], *found["answers"]])


def test_the_verbs_that_the_readme_shows_exist() -> None:
    lines = re.findall(r"^tokenmill ([a-z ]+?)(?= +[#A-Z-]| *$)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(lines) >= 4
    for line in lines:
        assert CliRunner().invoke(app, [*line.split(), "--help"]).exit_code == 0, line
    for verb in ("serve", "generate", "chat", "doctor", "bench"):
        assert any(line.split()[0] == verb for line in lines)


def shown_commands(document: str) -> list[str]:
    """Every command line of the engine in code blocks and in prose, long ones joined."""
    text = (ROOT / document).read_text().replace("\\\n", " ")
    lines = re.findall(r"^tokenmill .*$", text, re.MULTILINE) + re.findall(r"`(tokenmill [^`]+)`", text)
    return [re.split(r"\s#|[|;&<>]", line)[0].replace("[", "").replace("]", "").strip() for line in lines]


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if shown_commands(d)])
def test_commands_that_a_document_shows_are_understood(document: str) -> None:
    """Verbs, flags and numbers of values, without running anything."""
    for line in shown_commands(document):
        words = [word for word in shlex.split(line)[1:] if word != "..."]
        command = typer.main.get_command(app)
        context = command.make_context("tokenmill", [], resilient_parsing=True)
        while words and not words[0].startswith("-") and isinstance(command, typer.core.TyperGroup):
            found = command.get_command(context, words[0].rstrip(","))
            assert found is not None, line
            command, words = found, words[1:]
        if not words:
            continue  # the verb alone, in prose
        parser = command.make_parser(command.make_context("verb", [], resilient_parsing=True))
        try:
            _, left, _ = parser.parse_args(args=list(words))
        except Exception as error:
            raise AssertionError(f"{document}: {line}: {error}") from error
        assert not left, f"{document}: {line}: {left}"


_PARSES = """
import argparse, contextlib, io, json, os, runpy, sys
class Parsed(Exception): pass
plain, faults = argparse.ArgumentParser.parse_args, []
def parse(self, args=None, namespace=None):
    plain(self, args, namespace)
    raise Parsed
argparse.ArgumentParser.parse_args = parse
path = list(sys.path)
for words in json.loads(sys.argv[1]):
    sys.argv, sys.path, said = words, [os.path.dirname(words[0]), ".", *path], io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            runpy.run_path(words[0], run_name="__main__")
    except Parsed:
        continue
    except SystemExit:
        faults.append([*words, said.getvalue()[-300:]])
print(json.dumps(faults))
"""
"""Runs scripts up to the point where they have understood their arguments."""


def test_scripts_that_documents_show_take_these_arguments() -> None:
    """Without running anything behind that."""
    asked = dict[str, list[str]]()
    for document in [*DOCUMENTS, RUNS]:
        text = (ROOT / document).read_text().replace("\\\n", " ")
        found = re.findall(r"^python (\S+\.py[^\n]*)", text, re.MULTILINE) + re.findall(
            r"`python (\S+\.py[^`]*)`", text
        )
        for line in found:
            plain = re.split(r"\s#", line)[0].replace("[", "").replace("]", "").replace("...", "")
            words = ["1" if word == "N" else word for word in shlex.split(plain)]
            if "argparse" in (ROOT / words[0]).read_text():
                asked[line] = words
    assert len(asked) > 15
    command = [sys.executable, "-c", _PARSES, json.dumps(list(asked.values()))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


def flags_of(command: Any) -> set[str]:
    inner = (flags_of(each) for each in getattr(command, "commands", {}).values())
    return {name for param in command.params for name in (*param.opts, *param.secondary_opts)}.union(*inner)


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if d != "docs/compatibility.md"])
def test_flags_and_variables_that_a_document_names_exist(document: str) -> None:
    """Also those in prose. (The page of vLLM's flags has its own test; lines about scripts have their own flags.)"""
    known = flags_of(typer.main.get_command(app)) | {"--help", "--help-all", "--max_model_len", "--ctx-size", "--temp"}
    source = "".join(path.read_text() for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")])
    options = {f"TOKENMILL_{name.upper()}" for groups in (config.GROUPS, config.SERVER_GROUPS)
               for name in config.all_options(groups)}  # fmt: skip
    for line in (ROOT / document).read_text().splitlines():
        if not re.search(r"bench/|tools/|python ", line):
            found = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", line))
            assert {name for name in found if name.replace("--no-", "--") not in known} <= known, line
        for name in set(re.findall(r"\bTOKENMILL_[A-Z_]+[A-Z]", line)) - options:
            assert name in source, line


def test_every_variable_that_programs_read_is_told_of() -> None:
    """Options aside: `--help` says that each flag is also a variable."""
    told = "".join((ROOT / document).read_text() for document in [*DOCUMENTS, "CONTRIBUTING.md"])
    files = [file for top in ("src", "tests", "bench", "tools") for file in (ROOT / top).rglob("*.py")]
    read = {name for file in files for name in re.findall(r"environ\W+(?:get\W+)?(TOKENMILL_\w+)\W", file.read_text())}
    assert len(read) > 10
    options = {f"TOKENMILL_{name.upper()}" for groups in (config.GROUPS, config.SERVER_GROUPS)
               for name in config.all_options(groups)}  # fmt: skip
    assert {name for name in read - options if not re.search(rf"\b{name}\b", told)} == set()


def test_the_curl_line_of_the_readme_is_a_request() -> None:
    (line,) = re.findall(r"^curl (.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    url, *_, body = shlex.split(line)
    assert url == "http://127.0.0.1:8000/v1/chat/completions"
    request = ChatRequest.model_validate(json.loads(body))
    assert request.model == "demo" and len(request.messages) == 1
    served = config.ListenOptions()
    assert (served.host, served.port) == ("127.0.0.1", 8000)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_a_document_names_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / document).parent.joinpath(link).exists(), link
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for name in re.findall(r"`([\w./-]+(?:/|\.(?:py|h|inl|cpp|toml)))(?::[^`]*)?`", prose):
        source = ROOT / "src" / "tokenmill"
        places = [ROOT, source, *source.glob("*/"), *source.glob("*/*/")]
        assert any((place / name).exists() for place in places), name


def anchors(document: Path) -> set[str]:
    """What links into a page may name: its headings, as a forge spells them."""
    prose = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_document_is_reached_from_the_readme() -> None:
    """By following links; and a link into a page names one of its headings."""
    reached, follow = set[Path](), [ROOT / "README.md"]
    while follow:
        document = follow.pop()
        reached.add(document)
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", document.read_text()):
            linked = (document.parent / target).resolve() if target else document
            assert not anchor or anchor in anchors(linked), f"{document.name}: {target}#{anchor}"
            if linked.suffix == ".md" and linked not in reached:
                follow.append(linked)
    pages = {*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")}
    assert pages <= reached, pages - reached


def test_the_names_that_a_document_finds_in_a_file_are_defined_there() -> None:
    """`FILE: NAME`, `NAME` of `FILE` and `NAME` (`FILE`)."""
    file, name = r"([\w/.]+\.(?:py|h|inl|cpp))", r"([A-Za-z_]\w*)(?:\(\))?"
    lost = []
    for document in [*DOCUMENTS, "CONTRIBUTING.md"]:
        text = re.sub(r"\s+", " ", (ROOT / document).read_text())
        pairs = re.findall(rf"`{file}: ([^`]+)`", text)
        pairs += [(where, what) for what, where in re.findall(rf"`{name}` (?:of |in |\()`{file}`", text)]
        for where, what in pairs:
            found = [path for top in ("src", "csrc", "tests", "tools", "bench") for path in (ROOT / top).rglob("*.*")
                     if str(path).endswith(f"/{where}")]  # fmt: skip
            source = "".join(path.read_text() for path in found)
            lost += [f"{document}: {where}: {word}" for word in re.findall(r"[A-Za-z_]\w+", what)
                     if not re.search(rf"\b{word}\b", source)]  # fmt: skip
    assert not lost


def test_every_run_of_a_figure_says_when_of_what_and_how() -> None:
    pages = [ROOT / "docs" / name for name in ("performance.md", "history/h200-2026-11.md")]
    figures, notes = (page.read_text() for page in pages)
    runs_page = (ROOT / RUNS).read_text()
    known = set[str]()
    for row in runs_page[runs_page.index("| run | date ") :].splitlines()[2:]:
        runs, dates, commit, _, command, _ = (cell.strip() for cell in row.strip("|").split("|"))
        known.update(re.findall(r"\b[GCST]\d+\b", runs))
        assert re.fullmatch(r"2026-\d\d-\d\d", dates) and re.search(r"\b[0-9a-f]{7}", commit) and command, row
    named = set(re.findall(r"\b[GCST]\d+\b", figures))
    assert named <= known <= named | set(re.findall(r"\bG\d+\b", notes))


def test_what_documents_ask_of_make_is_a_target() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in [*DOCUMENTS, "CONTRIBUTING.md"]:
        text = (ROOT / document).read_text()
        asked = set(re.findall(r"`make ([a-z-]+)", text)) | set(re.findall(r"^make ([a-z-]+)", text, re.MULTILINE))
        assert asked <= targets, f"{document}: {asked - targets}"


def test_no_registry_is_named() -> None:
    """pip knows where packages come from; a project that names places breaks behind a mirror."""
    files = [*DOCUMENTS, "CONTRIBUTING.md", "Makefile", "pyproject.toml", "tools/install.py"]
    for file in [*files, *(f"constraints/{p.name}" for p in (ROOT / "constraints").iterdir())]:
        assert not re.search(r"index-url|pypi\.|whl/c|download\.pytorch", (ROOT / file).read_text()), file


def test_the_page_of_models_is_that_of_the_registry() -> None:
    spec = importlib.util.spec_from_file_location("models_page", ROOT / "tools" / "models.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "models.md").read_text() == module.page(), "run python tools/models.py --write"
    told = re.findall(r"(\d+) architectures", (ROOT / "README.md").read_text())
    assert set(told) == {str(len(registry.architectures()))} and len(told) == 2


def test_the_formats_of_messages_are_all_named() -> None:
    page = (ROOT / "docs" / "structured.md").read_text()
    calls, thoughts = page.split("`--tool-call-parser` names one:")[1], page.split("`--reasoning-parser`:")[1]
    for kinds, text in ((CALL_FORMATS, calls.split("names\nfor them")[0]), (THINKING, thoughts.split("\n## ")[0])):
        assert all(re.search(rf"\b{name}\b", text) for name in kinds), set(kinds)
    told = re.search(r"(\d+) formats of tool calls and (\d+) of reasoning", (ROOT / "README.md").read_text())
    assert told is not None and told.groups() == (str(len(CALL_FORMATS)), str(len(THINKING)))
    seen = re.search(r"text parts of (\d+) that also see", (ROOT / "README.md").read_text())
    assert seen is not None and int(seen[1]) == len(OUTERS), len(OUTERS)


def test_the_page_of_hardware_is_that_of_the_matrix() -> None:
    spec = importlib.util.spec_from_file_location("hardware_page", ROOT / "tools" / "hardware.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page(), "run python tools/hardware.py --write"
    devices = json.loads(module.MATRIX.read_text())["devices"]
    assert set(devices) == set(module.GENERATIONS)
    for name in {kernel for device in devices.values() for kernel in device}:
        assert name in module.kernels(), f"{name} is no kernel any more: run bench/gpu_matrix.py --summary again"
    assert set(module.instruction_sets()) == set(module.SETS)
    only = {"wide._wide_kernel": {"sm_90"}, "hopper._hopper_kernel": {"sm_90"}}
    for name, expected in only.items():
        assert {device for device, found in devices.items() if name in found} <= expected, name
    assert not devices["sm_89"].keys() & {"shared._shared_kernel", "gathered._gathered_kernel"}, "too large for it"


# ------------------------------------------------------------------ the recipes


def test_the_model_of_the_recipe_answers_as_llama_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = types.ModuleType("tokenmill.models.example")
    example.__dict__.update(names("docs/add-a-model.md"))
    monkeypatch.setitem(sys.modules, "tokenmill.models.example", example)
    monkeypatch.setitem(registry._FAMILIES, "PlainForCausalLM", "example")
    monkeypatch.setitem(FIELDS, "PlainForCausalLM", replace(FIELDS["LlamaForCausalLM"], model_type="plain"))
    folder = make_tiny(tmp_path, architecture="llama")
    config = json.loads((folder / "config.json").read_text())
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    answers = []
    for architecture, kind in (("LlamaForCausalLM", "llama"), ("PlainForCausalLM", "plain")):
        named = {**config, "architectures": [architecture], "model_type": kind}
        (folder / "config.json").write_text(json.dumps(named))
        with LLM(str(folder), num_blocks=64, max_num_seqs=4) as llm:
            answers.append(llm.generate(["The mill", [5, 6, 7]], params, use_tqdm=False))
    theirs, ours = ([out.outputs[0].token_ids for out in outs] for outs in answers)
    assert ours == theirs


def test_the_weight_of_the_recipe_joins_splits_and_multiplies() -> None:
    half = names("docs/add-a-weight-format.md")["HalfWeight"]
    torch.manual_seed(0)
    table, other, x = torch.randn(8, 6), torch.randn(4, 6), torch.randn(5, 6)
    bias = torch.randn(8)
    ctx = types.SimpleNamespace(kernels=ReferenceKernels())
    weight = half(table, bias)
    plain = DenseWeight(weight.dense(), bias)
    norm = NormSpec(torch.rand(6), 1e-6)
    residual = torch.randn(5, 8)
    torch.testing.assert_close(
        weight.matmul(x, ctx, norm=norm, act="relu", residual=residual),
        plain.matmul(x, ctx, norm=norm, act="relu", residual=residual),
    )
    joined = half(table).concat([half(other)])
    assert type(joined) is half and joined.shape == (12, 6) and joined.bytes() == 12 * 6 * 2
    mixed = weight.concat([half(other)])
    torch.testing.assert_close(mixed.matmul(x, ctx)[:, :8], weight.matmul(x, ctx))
    torch.testing.assert_close(mixed.matmul(x, ctx)[:, 8:], half(other).matmul(x, ctx))
    sliced = [weight.split(0, part, 2) for part in range(2)]
    torch.testing.assert_close(torch.cat([s.matmul(x, ctx) for s in sliced], -1), weight.matmul(x, ctx))
    summed = sum(weight.split(1, part, 2).matmul(x[:, 3 * part : 3 * part + 3], ctx) for part in range(2))
    torch.testing.assert_close(summed, weight.matmul(x, ctx))
    index = torch.tensor([7, 0, 3])
    torch.testing.assert_close(weight.take(index).dense(), weight.rows(index))


def test_the_fast_weight_of_the_recipe_needs_its_kernel_and_a_line_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = pytest.importorskip("tokenmill.kernels.cpu", reason="the native kernels were not built")
    found = names("docs/add-a-weight-format.md")
    weight = found["RowTableWeight"].round(torch.randn(96, 64), torch.randn(96))
    x, norm, residual = torch.randn(7, 64), NormSpec(torch.rand(64), 1e-6), torch.randn(7, 96)
    around = {"norm": norm, "act": "relu", "residual": residual}
    native = types.SimpleNamespace(kernels=cpu.CpuKernels())
    wanted = DenseWeight(weight.dense(), weight.bias).matmul(x, native, **around)
    part = weight.split(1, 1, 2)
    assert torch.equal(part.dense(), weight.dense()[:, 32:]) and part.bias is None
    assert torch.equal(weight.take(torch.tensor([5, 0])).dense(), weight.dense()[[5, 0]])
    answers = []
    for kernels, known in ((ReferenceKernels(), False), (cpu.CpuKernels(), False), (cpu.CpuKernels(), True)):
        if known:
            monkeypatch.setitem(cpu.packed.PACKERS, "row-tables", found["pack_row_tables"])
        ctx, settled = types.SimpleNamespace(kernels=kernels), weight.take(torch.arange(96)).settle(kernels)
        assert (settled.packed is not None) == known == (settled.codes is None)
        torch.testing.assert_close(settled.matmul(x, ctx, **around), wanted, rtol=1e-5, atol=1e-5)
        assert torch.equal(settled.matmul(x[3:4], ctx), settled.matmul(x, ctx)[3:4])
        assert kernels.counters().get("own_product", {}).get("calls", 0) == (3 if known else 0)
        answers.append(settled.dense())
    assert torch.equal(answers[0], answers[1]) and torch.equal(answers[0], answers[2])
    monkeypatch.setattr(detect, "from_dense", lambda weight, bias, *how: found["RowTableWeight"].round(weight, bias))
    folder, params = str(make_tiny(tmp_path)), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    texts = []
    for known in (True, False):
        if not known:
            monkeypatch.delitem(cpu.packed.PACKERS, "row-tables")
        with LLM(folder, num_blocks=64, max_num_seqs=4) as llm:
            outs = llm.generate([[5, 6, 7], list(range(20, 40))], params, use_tqdm=False)
            assert ("own_product" in llm.engine.executor.runner.kernels.counters()) == known
        texts.append([out.outputs[0].token_ids for out in outs])
    assert texts[0] == texts[1]


def test_the_kernel_of_the_recipe_agrees_with_the_reference_and_counts() -> None:
    quick = names("docs/add-a-kernel.md")["QuickNorm"]()
    x, weight = torch.randn(4, 32), torch.rand(32)
    for spec, fallbacks in ((NormSpec(weight, 1e-5, offset=1.0), 0), (NormSpec(weight, 1e-5, kind="layer"), 1)):
        torch.testing.assert_close(quick.norm(x, spec), ReferenceKernels().norm(x, spec))
        assert quick.counters()["norm"]["fallbacks"] == fallbacks


@pytest.mark.parametrize("depth", [1, 2])
def test_the_drafters_of_the_recipe_are_right_often_and_change_nothing(
    depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(make_tiny(tmp_path))
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    wild = SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True)
    prompts = [[5, 6, 7] * 6, [9] * 12, list(range(20, 40))]
    with LLM(folder, num_blocks=256, max_num_seqs=8) as llm:
        plain = [llm.generate(prompts, params, use_tqdm=False) for params in (greedy, wild)]
    recipe = names("docs/add-a-drafter.md")
    monkeypatch.setitem(drafting.METHODS, "period", ())
    monkeypatch.setitem(drafting.OF_HOST, "period", lambda found: recipe["PeriodDrafter"]())
    config = {"method": "period" if depth == 1 else "ngram", "num_speculative_tokens": 4}
    with LLM(folder, num_blocks=256, max_num_seqs=8, speculative_config=config, pipeline_depth=depth) as llm:
        if depth > 1:
            llm.engine.executor.runner.drafter = recipe["PeriodOnDevice"](4)
        guessed = [llm.generate(prompts, params, use_tqdm=False) for params in (greedy, wild)]
        counters = llm.engine.scheduler.counters
    assert [[o.outputs[0].token_ids for o in run] for run in guessed] == [
        [o.outputs[0].token_ids for o in run] for run in plain
    ]
    assert 0 < counters.accepted <= counters.drafted
