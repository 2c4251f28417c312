"""Text as it comes, for asyncio programs."""

from __future__ import annotations

import asyncio
import sys

from tokenmill import AsyncEngineArgs, AsyncLLMEngine, RequestOutputKind, SamplingParams


async def stream(engine: AsyncLLMEngine, prompt: str, name: str) -> str:
    """Print the pieces of one answer; -> all of them."""
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=7, output_kind=RequestOutputKind.DELTA)
    text = ""
    async for output in engine.generate(prompt, params, request_id=name):
        for piece in output.outputs:
            text += piece.text
            print(f"{name}: {piece.text!r}")
    return text


async def run(model: str) -> list[str]:
    """Two answers side by side."""
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=model, enforce_eager=True))
    try:
        prompts = ["The future of AI is", "In a galaxy far away"]
        return await asyncio.gather(*(stream(engine, prompt, f"stream-{i}") for i, prompt in enumerate(prompts)))
    finally:
        engine.shutdown()


def main(model: str = "demo") -> list[str]:
    """Stream, and give back the texts."""
    return asyncio.run(run(model))


if __name__ == "__main__":
    main(*sys.argv[1:])
