"""Every output says with which adapter it was made, however it was asked for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.cpu.engine.engines import open_llm
from tests.cpu.lora.lora_company_helpers import ON, asked

from tokenmill import AsyncLLM, BeamSearchParams, LoRARequest, RequestOutput, RequestOutputKind, SamplingParams

SHORT = {"max_tokens": 3, "ignore_eos": True, "temperature": 0.8, "seed": 1}


def told(output: RequestOutput) -> LoRARequest | None:
    assert all(each.lora_request == output.lora_request for each in output.outputs)
    return output.lora_request


def test_outputs_say_their_adapter(base: Path, adapters: dict[str, Path]) -> None:
    one, two = asked(adapters)[3:5]
    each: list[LoRARequest | None] = [one, None, two]
    params = SamplingParams(n=2, best_of=3, **SHORT)
    with open_llm(base, **ON) as llm:
        assert [told(out) for out in llm.generate(["a", "b", "c"], params, False, lora_request=each)] == each
        assert [told(out) for out in llm.generate(["a", "b"], params, False, lora_request=one)] == [one, one]
        assert [told(out) for out in llm.generate(["a"], params, False)] == [None]
        talk = [{"role": "user", "content": "x"}]
        assert [told(out) for out in llm.chat([talk] * 3, params, False, each)] == each
        beams = BeamSearchParams(beam_width=2, max_tokens=3)
        apart = [llm.beam_search([text], beams, lora)[0] for text, lora in zip("abc", each, strict=True)]
        assert llm.beam_search([*"abc"], beams, each, concurrency_limit=2) == apart
        for name, lora in zip("xyz", each, strict=True):
            llm.llm_engine.add_request(name, "a", params, lora_request=lora)
        found = {}
        while llm.llm_engine.has_unfinished_requests():
            found |= {out.request_id: told(out) for out in llm.llm_engine.step()}
        assert found == dict(zip("xyz", each, strict=True))


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_streams_say_their_adapter(base: Path, adapters: dict[str, Path], kind: RequestOutputKind) -> None:
    one = asked(adapters)[3]
    params = SamplingParams(output_kind=kind, **SHORT)

    async def all_of(stream: Any) -> list[Any]:
        return [told(out) async for out in stream]

    async def ask() -> None:
        async with AsyncLLM(str(base), dtype="float32", **ON) as engine:
            for lora in (one, None):
                assert set(map(str, await all_of(engine.generate("a", params, lora_request=lora)))) == {str(lora)}
                talk = [{"role": "user", "content": "x"}]
                assert set(map(str, await all_of(engine.chat(talk, params, lora_request=lora)))) == {str(lora)}

    asyncio.run(ask())
