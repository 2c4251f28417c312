"""Acceptance of drafts. Owns: which sampled tokens count. Must not know: tensors, where drafts come from.

Noise depends on the position alone, so the sample at a position is the token that plain decoding would have taken
there, provided that the tokens before it are right: a draft is accepted if it equals the sample of its position.
"""

from __future__ import annotations


def accept(sampled: list[list[int]], drafts: list[list[int]]) -> list[list[int]]:
    """Per row, d drafts and 1 + d samples -> the samples up to and including the first that is not its draft."""
    kept: list[list[int]] = []
    for samples, guesses in zip(sampled, drafts, strict=True):
        assert len(samples) == len(guesses) + 1, "a row samples once per draft and once more"
        right = 0
        while right < len(guesses) and samples[right] == guesses[right]:
            right += 1
        kept.append(samples[: right + 1])
    return kept
