"""Samplers over HTTP: fields reach the engine under llama.cpp's names, and values that cannot be meant are refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pure.server.conftest import Starter
from tokenmill.core.request import Request, SamplingParams, TokenDelta
from tokenmill.server.engines.fleet import Fleet
from tokenmill.server.engines.state import Open

GIVEN: dict[str, Any] = {
    **{"repeat_last_n": 5, "top_n_sigma": 1.5, "epsilon_cutoff": 3.0, "eta_cutoff": 4.0, "top_a": 0.2},
    **{"xtc_probability": 0.5, "xtc_threshold": 0.2, "dynatemp_range": 0.5, "dynatemp_exponent": 2.0},
    **{"smoothing_factor": 0.3, "smoothing_curve": 1.5, "mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.2},
    **{"dry_multiplier": 0.8, "dry_base": 2.0, "dry_allowed_length": 3, "dry_penalty_last_n": 64},
    **{"dry_sequence_breakers": ["a"], "no_repeat_ngram_size": 3, "samplers": ["top_k", "temperature"]},
    **{"temperature_last": True},
}
WRONG: dict[str, Any] = {
    **{"repeat_last_n": -2, "top_n_sigma": -2, "epsilon_cutoff": -1, "eta_cutoff": 10_001, "top_a": 1.5},
    **{"xtc_probability": 2, "xtc_threshold": "a", "dynatemp_range": -1, "dynatemp_exponent": -0.5},
    **{"smoothing_factor": -1, "smoothing_curve": 0, "mirostat": 3, "mirostat_tau": -1, "mirostat_eta": 101},
    **{"dry_multiplier": -0.1, "dry_base": 0.9, "dry_allowed_length": 0.5, "dry_penalty_last_n": -2},
    **{"dry_sequence_breakers": [""], "no_repeat_ngram_size": -1, "samplers": ["top_k", "dry"], "temperature_last": 1},
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[SamplingParams]:
    """What engines are asked for."""
    found: list[SamplingParams] = []
    inner = Fleet.open

    def opened(self: Fleet, request: Request, *rest: Any, **more: Any) -> Any:
        found.append(request.params)
        return inner(self, request, *rest, **more)

    monkeypatch.setattr(Fleet, "open", opened)
    return found


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_fields_reach_the_engine(start: Starter, asked: list[SamplingParams], path: str) -> None:
    served = await start()
    body = (
        {"prompt": "Hi", "max_tokens": 2}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "Hi"}]}
    )
    answer = await served.post(path, {"model": "fake", **body, **GIVEN})
    assert answer.status_code == 200, answer.text
    (found,) = asked
    assert {name: getattr(found, name) for name in GIVEN} == GIVEN


async def test_options_of_ollama_reach_the_engine(start: Starter, asked: list[SamplingParams]) -> None:
    served = await start()
    options = {"repeat_last_n": 7, "mirostat": 1, "mirostat_tau": 2.0, "mirostat_eta": 0.3, "typical_p": 0.5}
    body = {"model": "fake", "prompt": "x", "stream": False, "options": {**options, "num_predict": 2}}
    assert (await served.post("/api/generate", body)).status_code == 200
    (found,) = asked
    assert {name: getattr(found, name) for name in options} == options


@pytest.mark.parametrize("name", WRONG)
async def test_values_out_of_range_are_refused_by_name(start: Starter, name: str) -> None:
    served = await start()
    answer = await served.post("/v1/completions", {"model": "fake", "prompt": "Hi", name: WRONG[name]})
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith(name), answer.text


async def test_other_spellings(start: Starter, asked: list[SamplingParams]) -> None:
    served = await start()
    body = {"model": "fake", "prompt": "Hi", "max_tokens": 2, "nsigma": 1.25, "mirostat_mode": 1}
    assert (await served.post("/v1/completions", body)).status_code == 200
    assert (asked[0].top_n_sigma, asked[0].mirostat) == (1.25, 1)


def test_what_mirostat_has_come_to_is_kept_for_another_engine() -> None:
    request = Request(id="a", prompt_ids=[1], params=SamplingParams(n=2, mirostat=2))
    entry = Open(request, None, None, None, emitted=[[], []])  # type: ignore[arg-type]
    entry.say(TokenDelta("a", 1, [5], mu=4.5))
    entry.say(TokenDelta("a", 1, [6], mu=4.25))
    entry.say(TokenDelta("a", 0, [7]))
    again = entry.replayed()
    assert (again.emitted, again.mus) == ([[7], [5, 6]], [None, 4.25])
