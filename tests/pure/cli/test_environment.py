"""Variables that look like tokenmill's and are none."""

from __future__ import annotations

import pytest

from tokenmill.core.config import make_server_config
from tokenmill.core.environment import unread_variables
from tokenmill.core.errors import ParameterError


@pytest.mark.parametrize(("name", "said"), [
    ("TOKENMILL_MAX_MODEL_LENGTH", "did you mean TOKENMILL_MAX_MODEL_LEN?"),
    ("TOKENMILL_max_model_len", "did you mean TOKENMILL_MAX_MODEL_LEN?"),
    ("TOKENMILL_PROT", "did you mean TOKENMILL_PORT?"), ("TOKENMILL_XYZZY_QUUX", "nothing reads it."),
])  # fmt: skip
def test_a_variable_that_nothing_reads_is_named(name: str, said: str) -> None:
    (sentence,) = unread_variables({name: "1", "HOME": "/root", "TOKENMILL_CACHE": "/tmp"})
    assert sentence.startswith(name) and sentence.endswith(said)


@pytest.mark.parametrize("name", ["VLLM_API_KEY", "LLAMA_API_KEY"])
def test_another_servers_key_is_named_unless_there_is_one_of_ours(name: str) -> None:
    (sentence,) = unread_variables({name: "secret"})
    assert sentence.startswith(name) and "TOKENMILL_API_KEY" in sentence and "secret" not in sentence
    assert not list(unread_variables({name: "secret", "TOKENMILL_API_KEY": "another"}))


def test_options_places_and_tests_are_read() -> None:
    names = ("TOKENMILL_PORT", "TOKENMILL_MAX_MODEL_LEN", "TOKENMILL_HOME", "TOKENMILL_FAMILIES", "TOKENMILL_FUZZ_SEED")
    assert not list(unread_variables(dict.fromkeys(names, "1")))


@pytest.mark.parametrize(("name", "text"), [("PORT", "99999"), ("LOG_LEVEL", "DEBUG"), ("MAX_N", "0")])
def test_a_value_that_cannot_be_is_told_under_the_variables_name(name: str, text: str) -> None:
    with pytest.raises(ParameterError, match=f"^TOKENMILL_{name} must be .*{text}"):
        make_server_config({f"TOKENMILL_{name}": text})
    option = name.lower()
    with pytest.raises(ParameterError, match=f"^{option} must"):
        make_server_config({f"TOKENMILL_{name}": text}, **{option: "DEBUG" if name == "LOG_LEVEL" else -7})
