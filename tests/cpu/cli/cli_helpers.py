"""What the tests of verbs share."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from tokenmill.cli.verbs import app


def run(*arguments: str, typed: str | None = None, code: int = 0) -> Result:
    result = CliRunner().invoke(app, list(arguments), input=typed)
    assert result.exit_code == code, (result.stderr, result.exception)
    return result
