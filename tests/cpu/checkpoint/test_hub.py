"""Downloads, against a server that stands in for the hub: GGUF repositories, broken connections, tokens, no network."""

from __future__ import annotations

import fnmatch
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cpu.checkpoint.hub_server import Hub, serving

from tokenmill.checkpoint.hub import gguf_patterns, models_of
from tokenmill.core.errors import UserError

FOLDER = {"config.json": b"{}", "tokenizer.json": b"{ }", "model.safetensors": os.urandom(300_000), "README.md": b"x"}
QUANTS = {
    "README.md": b"x", "config.json": b"{}", "mmproj-F16.gguf": b"eyes", "small-Q4_K_M.gguf": b"four",
    "small-Q4_K_S.gguf": b"less", "small-q8_0.gguf": b"eight", "small-UD-IQ1_S.gguf": b"one",
    "BF16/small-BF16-00001-of-00002.gguf": b"wide", "BF16/small-BF16-00002-of-00002.gguf": b"wider",
}  # fmt: skip
LARGE = os.urandom(1 << 20) * 12
SCRIPT = """
import sys
from tokenmill.checkpoint.hub import Hub, resolve_model
from tokenmill.core.errors import UserError
name, revision, folder, token = sys.argv[1:]
try:
    print(resolve_model(name, revision or None, Hub(folder or None, token or None)))
except UserError as error:
    print("refused:", error)
"""


@pytest.fixture(scope="module")
def hub():
    files = {
        "mill/large": {"config.json": b"{}", "model.safetensors": LARGE},
        "mill/small": FOLDER, "mill/small-GGUF": QUANTS, "mill/one-GGUF": {"tiny.Q5_K_M.gguf": b"five"},
        "mill/odd-GGUF": {"a-Q2_K.gguf": b"a", "b-Q3_K.gguf": b"b"},
        "mill/old": {"config.json": b"{}", "pytorch_model.bin": b"bin"},
    }  # fmt: skip
    with serving(Hub(files, gated={"mill/gated"})) as hub:
        yield hub


@pytest.fixture
def ask(hub, tmp_path):
    """A function that resolves a name in a process of its own, as the hub's library reads its variables at import."""

    def resolve(name: str, revision: str = "", folder: str = "", token: str = "", **variables: str) -> str:
        hub.asked.clear()
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
        own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        own |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, name, revision, folder, token], capture_output=True, text=True, timeout=300,
            env={**kept, **own, **variables},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1]

    return resolve


def test_a_folder_is_downloaded_once_and_found_without_a_network(hub, ask, tmp_path):
    folder = Path(ask("mill/small"))
    assert (folder / "model.safetensors").read_bytes() == FOLDER["model.safetensors"]
    assert sorted(hub.downloads()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert ask("mill/small", HF_HUB_OFFLINE="1") == str(folder) and not hub.asked
    assert ask("mill/small") == str(folder) and not hub.downloads()
    assert "nor in the download cache" in ask("mill/old", HF_HUB_OFFLINE="1")
    assert ask("mill/small", folder=str(tmp_path / "mine")).startswith(str(tmp_path / "mine"))


def test_a_broken_download_goes_on_where_it_ended(hub, ask):
    hub.breaks[:] = [11 << 20, *[9] * 6]  # 11 MiB, then more often than the library tries again
    said = ask("mill/large")
    assert said.startswith("refused: downloading mill/large failed") and said.endswith("goes on where it broke off")
    hub.breaks.clear()
    (done,) = Path(ask("mill/large")).glob("*.safetensors")
    assert done.read_bytes() == LARGE
    ranges = [given for method, path, given in hub.asked if method == "GET" and path.endswith("model.safetensors")]
    assert len(ranges) == 1 and int(str(ranges[0]).removeprefix("bytes=").split("-")[0]) >= 10_000_000
    assert not list(done.parents[2].rglob("*.part"))


def test_one_of_several_gguf_files_is_named(hub, ask):
    assert Path(ask("mill/small-GGUF:Q4_K_M")).read_bytes() == b"four"
    assert hub.downloads() == ["small-Q4_K_M.gguf"]
    assert Path(ask("mill/small-GGUF:Q8_0")).read_bytes() == b"eight"
    parts = Path(ask("mill/small-GGUF:bf16"))
    assert parts.name == "small-BF16-00001-of-00002.gguf"
    assert sorted(file.name for file in parts.parent.iterdir()) == sorted(QUANTS)[:0] + [
        "small-BF16-00001-of-00002.gguf", "small-BF16-00002-of-00002.gguf"]  # fmt: skip
    said = ask("mill/small-GGUF:Q9_X")
    assert said.startswith("refused: mill/small-GGUF has no GGUF file for 'Q9_X': it has BF16, Q4_K_M, Q4_K_S, q8_0")
    assert ask("mill/small-GGUF:Q4_K_M", HF_HUB_OFFLINE="1").endswith("small-Q4_K_M.gguf") and not hub.asked


def test_without_a_name_the_usual_one_or_the_only_one_is_taken(hub, ask):
    assert Path(ask("mill/small-GGUF")).read_bytes() == b"four"
    assert Path(ask("mill/one-GGUF")).read_bytes() == b"five"
    assert "name one of them: mill/odd-GGUF:Q2_K, mill/odd-GGUF:Q3_K" in ask("mill/odd-GGUF")
    assert (Path(ask("mill/old")) / "pytorch_model.bin").read_bytes() == b"bin"


def test_what_the_hub_refuses_is_told(hub, ask):
    assert "there is no model 'mill/absent'" in ask("mill/absent")
    assert "is gated" in ask("mill/gated")
    assert "has no revision 'v9'" in ask("mill/small", "v9")
    hub.token = "secret"
    try:
        assert "log in (HF_TOKEN)" in ask("mill/old")
        assert "log in (HF_TOKEN)" in ask("mill/old", token="wrong")
        for given in ({"token": "secret"}, {"HF_TOKEN": "secret"}):
            assert (Path(ask("mill/old", "v1", **given)) / "pytorch_model.bin").exists()
    finally:
        hub.token = None


@pytest.mark.parametrize(
    ("header", "value", "words"),
    [
        ("ETag", '"../../../../evil"', "is no name for it"),
        ("X-Repo-Commit", "../../../../evil", "is no name for it"),
        ("ETag", f'"{0:064x}"', "arrived changed"),
    ],
)
def test_what_a_false_hub_says_is_not_believed(hub, ask, tmp_path, header, value, words):
    hub.lies = {header: value}
    try:
        said = ask("mill/small", HF_HUB_CACHE=str(tmp_path / "a" / "b" / "c"))
    finally:
        hub.lies = {}
    assert words in said and "\n" not in said and str(tmp_path) not in said
    assert not list(tmp_path.rglob("evil*")) and not list(tmp_path.rglob("*.part"))


def test_a_page_in_place_of_an_answer_is_told(hub, ask):
    hub.page = b"<html>Log in</html>"
    try:
        assert "what the hub answers is wrong" in ask("mill/small")
    finally:
        hub.page = None


def test_without_the_hub_what_was_downloaded_is_used(hub, ask):
    folder = ask("mill/one-GGUF:Q5_K_M")
    assert ask("mill/one-GGUF:Q5_K_M", HF_ENDPOINT="http://127.0.0.1:9") == folder
    assert "cannot be reached" in ask("mill/new", HF_ENDPOINT="http://127.0.0.1:9")


def test_kinds_of_gguf_files():
    assert models_of(list(QUANTS)) == {
        "q4_k_m": ("Q4_K_M", "small-Q4_K_M.gguf"), "q4_k_s": ("Q4_K_S", "small-Q4_K_S.gguf"),
        "q8_0": ("q8_0", "small-q8_0.gguf"), "ud-iq1_s": ("UD-IQ1_S", "small-UD-IQ1_S.gguf"),
        "bf16": ("BF16", "BF16/small-BF16-00001-of-00002.gguf"),
    }  # fmt: skip
    assert models_of(["sub/plain.gguf"]) == {"plain": ("plain", "sub/plain.gguf")}
    parts, more = [[f"a/m-{kind}-0000{n}-of-00002.gguf" for n in (1, 2)] for kind in ("Q8_0", "Q8_0-long")]
    found = {file for pattern in gguf_patterns("q8_0") for file in fnmatch.filter([*parts, *more], pattern)}
    assert found == set(parts), "no other model's parts"


@pytest.mark.parametrize("name", ["mill/small:", "small:Q4_K_M", "mill/small:a/b", "mill/small:Q4:K", ":Q4_K_M"])
def test_misspelt_kinds_never_reach_the_hub(name):
    from tokenmill.checkpoint.hub import resolve_model

    with pytest.raises(UserError, match="neither an existing"):
        resolve_model(name)
