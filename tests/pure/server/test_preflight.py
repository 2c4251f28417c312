"""What `serve` can refuse without the model is refused before the model is loaded."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tokenmill.server.run
from tokenmill.cli.verbs import app
from tokenmill.core.config import make_server_config
from tokenmill.core.errors import ParameterError, UserError
from tokenmill.server.certificates import out_of_date, validity
from tokenmill.server.preflight import check_before_loading, read_template
from tokenmill.server.tls import context_of

REFUSED = {
    "no certificate": (["--ssl-certfile", "nofile"], "--ssl-certfile nofile cannot be read: No such file"),
    "a certificate that is none": (["--ssl-certfile", __file__], "in PEM format (--ssl-keyfile names"),
    "a key alone": (["--ssl-keyfile", __file__], "--ssl-keyfile needs --ssl-certfile"),
    "an authority alone": (["--ssl-ca-certs", __file__], "--ssl-ca-certs needs --ssl-certfile"),
    "no template": (["--chat-template", "nofile"], "--chat-template nofile cannot be read: No such file"),
    "a folder as template": (["--chat-template", "/"], "--chat-template / cannot be read: Is a directory"),
    "nowhere to record": (["--record", "/nowhere/x"], "--record /nowhere/x cannot be written: there is no such folder"),
    "a folder to record": (["--record", "/"], "it is a folder"),
    "content without a record": (["--record-content"], "needs --record FILE"),
    "calls": (["--tool-call-parser", "smoke"], "no tool-call parser 'smoke'; there are auto, none,"),
    "reasoning": (["--reasoning-parser", "smoke"], "no reasoning parser 'smoke'; there are auto, none,"),
    "traces": (["--otlp-traces-endpoint", "foo"], "must be an http(s) URL"),
    "half an address": (["--otlp-traces-endpoint", "http://["], "must be an http(s) URL"),
    "an empty key": (["--api-key", ""], "--api-key is empty"),
    "a blank key beside a good one": (["--api-key", "k", "--api-key", " "], "--api-key is empty"),
    "a key twice": (["--api-key", "k", "--api-key", "k"], "one key is given twice"),
    "a key that no header carries": (["--api-key", "k "], "no client could"),
    **{
        f"an empty {flag}": ([f"--{flag}="], f"--{flag} is empty: give a value, or leave the flag out")
        for flag in ("host", "uds", "lora-folder", "model-folder", "models", "response-role", "otlp-traces-endpoint")
    },
    "a default that requests set": (
        ["--default-chat-template-kwargs", '{"messages": []}'],
        "--default-chat-template-kwargs: 'messages' cannot be given as a template argument",
    ),
    "models that nobody changes": (["--model-folder", "/"], "no effect without --allow-model-changes"),
    "files that nobody sends": (["--max-blob-bytes", "5"], "no effect without --allow-model-changes"),
    "adapters that no engine takes": (["--lora-folder", "/"], "no effect without --enable-lora"),
    "memory for the only model": (["--models-memory", "5G"], "--models-memory has no effect with one model"),
    "a cache that one key shares": (["--api-key", "k", "--share-prefix-cache"], "no effect without several --api-key"),
    "memory for the only sleeper": (["--models-sleep-memory", "5G"], "--models-sleep-memory has no effect with one"),
    "a port beside a socket": (["--uds", "/tmp/x", "--port", "9"], "--port has no effect beside --uds"),
    "a host beside a socket": (["--uds", "/tmp/x", "--host", "0.0.0.0"], "--host has no effect beside --uds"),
    "a queue for no request": (["--models-queue", "0"], "--models-queue must be positive"),
    "a pattern of origins": (["--allowed-origins", "https://*.example"], "there are no patterns"),
    "an origin without its scheme": (["--allowed-origins", "page.example"], "an origin is a scheme, a host"),
    "a page for an origin": (["--allowed-origins", "https://page.example/chat"], "an origin is a scheme, a host"),
    "an address for a host": (["--allowed-hosts", "http://api.example"], "a host is a name or an address"),
    "a pattern of hosts": (["--allowed-hosts", "*.example"], "there are no patterns"),
    "no host": (["--allowed-hosts", ""], "a host is a name or an address"),
    "adapters of clients": (["--lora-folder", "/nowhere"], "--lora-folder /nowhere: there is no such folder"),
    "models of clients": (["--model-folder", "/nowhere"], "--model-folder /nowhere: there is no such folder"),
    "two counts of engines": (["--engines", "2", "--dp", "3"], "say different things"),
    "no name": (["--served-model-name", ""], "a name is empty"),
    "a name of nothing": (["--served-model-name", "a,,b"], "a name is empty"),
    "a name twice": (["--served-model-name", "a,b, a"], "a name stands twice"),
    "an adapter twice": (["--enable-lora", "--lora-modules", "b=/x,b=/x"], "lora_modules names 'b' twice"),
    "a scheme": (["--quantization", "nope"], "quantization 'nope': weights are quantised at load to fp8, int8,"),
    "a scheme of the head": (["--quantization", "fp8,head=nope"], "quantised at load to fp8, int8,"),
    "a method of drafts": (["--speculative-config", '{"method": "nope"}'], "method 'nope' is not available"),
    "a list for a method of drafts": (["--speculative-config", '{"method": ["ngram"]}'], "is not available"),
    "a key of drafts": (["--speculative-config", '{"method": "ngram", "lenght": 4}'], "unknown entries (lenght)"),
    "a drafter": (["--speculative-config", '{"model": "/nowhere"}'], "'/nowhere' is neither an existing folder"),
    "a drafter's scheme": (
        ["--speculative-config", '{"model": "a/b", "quantization": "nope"}'],
        "quantised at load to fp8, int8,",
    ),
    "a tokenizer": (["--tokenizer", "./nowhere"], "'./nowhere' is neither an existing folder"),
    "defaults of requests": (["--generation-config", "/nowhere"], "no generation_config.json in it"),
    "a default that nobody reads": (
        ["--override-generation-config", '{"temperatur": 1}'],
        "'temperatur' is not known here",
    ),
    "a default that is not done": (
        ["--override-generation-config", '{"num_beams": 4}'],
        "'num_beams' = 4 is not applied",
    ),
    "a default": (["--override-generation-config", '{"top_p": "x"}'], "--override-generation-config: 'top_p' = 'x'"),
    "adapters of nobody": (["--lora-modules", "a=b"], "--lora-modules needs enable_lora (--enable-lora)"),
    "an adapter without a path": (["--enable-lora", "--lora-modules", "a"], "--lora-modules takes NAME=PATH"),
    "an adapter that is not there": (["--enable-lora", "--lora-modules", "a=/nowhere"], "there is no such adapter"),
    "an adapter twice, as two words": (["demo", "--enable-lora", "--lora-modules", "a=/", "a=/"], "names 'a' twice"),
    "an adapter's name": (["--enable-lora", "--lora-modules", "..=/"], "an adapter's name is"),
    "groups of whole numbers": (["--kv-cache-group", "32"], "--kv-cache-group needs --kv-cache-dtype"),
    "experts of one rank": (["--enable-expert-parallel"], "which is 1"),
    "experts that stay": (["--eplb-config", '{"window_size": 5}'], "no effect without --enable-eplb"),
    "nothing to leave out": (["--disable", "heat"], "what can be left out is fusion,"),
    "slots of no adapters": (["--max-loras", "2"], "--max-loras has no effect without --enable-lora"),
    "a rank of no adapters": (["--max-lora-rank", "64"], "--max-lora-rank has no effect without --enable-lora"),
    "memory of no adapters": (["--max-cpu-loras", "9"], "--max-cpu-loras has no effect without --enable-lora"),
    "pieces of whole prompts": (
        ["--no-enable-chunked-prefill", "--long-prefill-token-threshold", "9"],
        "--long-prefill-token-threshold has no effect with --no-enable-chunked-prefill",
    ),
    "time for no search": (["--kernel-search-seconds", "9"], "no effect without --kernel-search load"),
    "where nothing sleeps": (["--sleep-folder", "/tmp"], "--sleep-folder has no effect without --enable-sleep-mode"),
    "checks without text": (["--skip-tokenizer-init", "--check-structured", "1"], "effect with --skip-tokenizer-init"),
    "a text": (["demo", "extra", "words"], "extra is not a folder, file or stored model here"),
}


@pytest.mark.parametrize("title", REFUSED)
def test_it_is_one_sentence_before_loading(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(server: object) -> None:
        raise AssertionError("the server went on")  # torch is imported behind this

    monkeypatch.setattr(tokenmill.server.run, "_bind", bind)
    monkeypatch.setattr("tokenmill.server.logs.set_up_logs", lambda options: None)
    flags, words = REFUSED[title]
    result = CliRunner().invoke(app, ["serve", *flags])
    assert result.exit_code == 2, result.exception
    assert words in result.stderr and "loading demo" not in result.stderr
    assert result.stderr.startswith("tokenmill: ") and result.stderr.count("\n") == 1 and "Errno" not in result.stderr


@pytest.mark.parametrize(("most", "refused"), [(64, True), (255, True), (256, False), (resource.RLIM_INFINITY, False)])
def test_a_server_needs_open_files(monkeypatch: pytest.MonkeyPatch, most: int, refused: bool) -> None:
    """With fewer it would answer one connection, and start no helper."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, most))
    with pytest.raises(UserError, match="ulimit -n 256") if refused else nullcontext():
        check_before_loading(make_server_config({}))


def test_what_is_right_passes_and_leaves_nothing(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    options = {"chat_template": str(template), "record": str(tmp_path / "record"), "api_key": ["k"]}
    check_before_loading(make_server_config({}, **options, tool_call_parser="hermes", reasoning_parser="none"))
    assert [path.name for path in tmp_path.iterdir()] == ["chat.jinja"]
    for text, words in (("{% if %}", "chat.jinja: the chat template cannot be compiled"), (" \n", "jinja is empty")):
        template.write_text(text)
        with pytest.raises(UserError, match=words):
            check_before_loading(make_server_config({}, **options))
    template.write_bytes(b"\xff")
    with pytest.raises(UserError, match="not UTF-8"):
        check_before_loading(make_server_config({}, **options))


def test_a_key_under_a_password_is_left_to_whoever_types_it(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not here")
    asked = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-passout", "pass:mill", "-days", "2", "-subj", "/CN=x"]
    asked += ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    subprocess.run(asked, check=True, capture_output=True)
    files = {"ssl_certfile": str(tmp_path / "cert.pem"), "ssl_keyfile": str(tmp_path / "key.pem")}
    check_before_loading(make_server_config({}, **files))
    given = f"ListenOptions(ssl_certfile={files['ssl_certfile']!r}, ssl_keyfile={files['ssl_keyfile']!r})"
    opened = f"from tokenmill.server.tls import *\ntry: context_of({given})\nexcept UserError as error: print(error)"
    alone = subprocess.run(  # no terminal, and nothing to read
        [sys.executable, "-c", opened], capture_output=True, stdin=subprocess.DEVNULL, start_new_session=True, text=True
    )
    assert f"{files['ssl_keyfile']}: this key is kept under a password" in alone.stdout, alone.stderr
    with pytest.raises(UserError, match="belongs to it"):
        check_before_loading(make_server_config({}, **{**files, "ssl_keyfile": files["ssl_certfile"]}))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """new.pem with key.pem, far.pem (its last day is written in another form) with other.pem, and old.pem of the same
    key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not here")
    folder = tmp_path_factory.mktemp("tls")
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x"]
    for name, key, days in (("new", "key", "2"), ("far", "other", "20000")):
        files = ["-keyout", str(folder / f"{key}.pem"), "-out", str(folder / f"{name}.pem"), "-days", days]
        subprocess.run([*make, *files], check=True, capture_output=True)
    asked = ["openssl", "req", "-new", "-key", str(folder / "key.pem"), "-subj", "/CN=x"]
    wish = subprocess.run(asked, check=True, capture_output=True).stdout
    sign = ["openssl", "x509", "-req", "-days", "-1", "-signkey", str(folder / "key.pem"), "-out"]
    subprocess.run([*sign, str(folder / "old.pem")], input=wish, check=True, capture_output=True)
    return folder


def test_a_key_of_another_certificate_is_named(certificates: Path) -> None:
    files = {"ssl_certfile": str(certificates / "new.pem"), "ssl_keyfile": str(certificates / "other.pem")}
    with pytest.raises(ParameterError, match="not the one that belongs to the certificate") as told:
        check_before_loading(make_server_config({}, **files))
    assert told.value.param == "ssl_keyfile"
    with pytest.raises(UserError, match=r"other\.pem: the private key is not the one that belongs"):
        context_of(make_server_config({}, **files).listen)  # as if the key had been opened with a password
    both = certificates / "both.pem"
    both.write_text("".join((certificates / name).read_text() for name in ("other.pem", "new.pem")))
    with pytest.raises(ParameterError, match="not the one that belongs"):
        check_before_loading(make_server_config({}, ssl_certfile=str(both)))


def test_certificates_that_do_not_hold_now_are_told(certificates: Path, caplog: pytest.LogCaptureFixture) -> None:
    def told(**files: str) -> list[tuple[str, object]]:
        caplog.clear()
        given = {flag: str(certificates / name) for flag, name in files.items()}
        check_before_loading(make_server_config({}, ssl_keyfile=str(certificates / "key.pem"), **given))
        return [(r.getMessage(), r.data["reason"]) for r in caplog.records]  # type: ignore[attr-defined]

    chain = "".join((certificates / name).read_text() for name in ("new.pem", "old.pem"))
    (certificates / "chain.pem").write_text(chain)
    assert not told(ssl_certfile="new.pem") and not told(ssl_certfile="new.pem", ssl_ca_certs="chain.pem")
    for files in ({"ssl_certfile": "old.pem"}, {"ssl_certfile": "chain.pem"}):
        ((message, reason),) = told(**files)
        assert "clients will refuse it" in message and str(reason).startswith("expired at ")
    ((message, reason),) = told(ssl_certfile="new.pem", ssl_ca_certs="old.pem")
    assert "none will be taken" in message and str(reason).startswith("expired at ")
    for name, days in (("new", 2), ("far", 20000), ("old", -1)):
        path = str(certificates / f"{name}.pem")
        ((begin, end),) = validity(path)
        assert end - begin == timedelta(days=days)
        assert out_of_date(path, begin - timedelta(seconds=1))[0].startswith("not valid before ")


def test_a_template_may_be_given_as_text() -> None:
    """As vLLM's flag takes it. What holds no expression is a file's name."""
    text = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert read_template(text) == text and read_template(None) is None
    with pytest.raises(UserError, match="cannot be read"):
        read_template("nowhere.jinja")
