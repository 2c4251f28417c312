"""What `serve` can refuse without the model is refused before the model is loaded."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tokenmill.server.run
from tokenmill.cli.main import app
from tokenmill.core.config import make_server_config
from tokenmill.core.errors import UserError
from tokenmill.server.preflight import check_before_loading

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
    "a key that no header carries": (["--api-key", "k "], "no client could"),
}


@pytest.mark.parametrize("title", REFUSED)
def test_it_is_one_sentence_before_loading(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(server: object) -> None:
        raise AssertionError("the server went on")

    monkeypatch.setattr(tokenmill.server.run, "_bind", bind)
    monkeypatch.setattr("tokenmill.server.logs.set_up_logs", lambda options: None)
    flags, words = REFUSED[title]
    result = CliRunner().invoke(app, ["serve", *flags])
    assert result.exit_code == 2, result.exception
    assert words in result.stderr and "loading demo" not in result.stderr
    assert result.stderr.startswith("tokenmill: ") and result.stderr.count("\n") == 1 and "Errno" not in result.stderr


def test_what_is_right_passes_and_leaves_nothing(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    options = {"chat_template": str(template), "record": str(tmp_path / "record"), "api_key": ["k"]}
    check_before_loading(make_server_config({}, **options, tool_call_parser="hermes", reasoning_parser="none"))
    assert [path.name for path in tmp_path.iterdir()] == ["chat.jinja"]
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
    with pytest.raises(UserError, match="belongs to it"):
        check_before_loading(make_server_config({}, **{**files, "ssl_keyfile": files["ssl_certfile"]}))
