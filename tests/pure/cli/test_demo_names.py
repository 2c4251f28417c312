"""The demo and what comes with it have names wherever a model is named; a slip is told with the right ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.core.errors import UserError
from tokenmill.demo import check_part, demo_dir, demo_model
from tokenmill.demo.files import ADAPTERS, PARTS


def test_parts_have_names() -> None:
    assert demo_model("demo") == demo_model("demo:latest") == demo_dir("main")
    assert [demo_model(f"demo:{part}") for part in PARTS] == [demo_dir(part) for part in PARTS]
    assert all((demo_dir(part) / "config.json").is_file() for part in ("main", *PARTS))


@pytest.mark.parametrize("name", ["model", "demo2", "./demo", "demo/main", "", ":draft"])
def test_other_names_are_no_parts(name: str) -> None:
    assert demo_model(name) is None
    check_part(name)


@pytest.mark.parametrize("name", ["demo:", "demo:drafts", "demo:main/../vlm", "demo:7b"])
def test_slips_are_told_with_what_there_is(name: str) -> None:
    assert demo_model(name) is None, "who only asks is not interrupted"
    with pytest.raises(UserError, match="demo:draft, demo:medusa, demo:moe"):
        check_part(name)


@pytest.mark.parametrize("part", ADAPTERS)
def test_an_adapter_is_told_to_be_one(part: str) -> None:
    assert (demo_dir(f"lora-{part}") / "adapter_config.json").is_file()
    with pytest.raises(UserError, match=f"demo:{part} is an adapter: .*--lora-modules {part}=demo:{part}` serves it"):
        check_part(f"demo:{part}")


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo:own").mkdir()
    monkeypatch.chdir(tmp_path)
    assert demo_model("demo:own") is None
    check_part("demo:own")
