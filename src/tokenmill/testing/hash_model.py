"""A "model" whose next token is a hash of its whole context. Owns: the oracle's arithmetic.

Nothing can be guessed: one wrong, stale or missing token in the context as read changes everything after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """A 64-bit finaliser: every input bit changes about half of the output bits."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)


@dataclass(frozen=True, slots=True)
class HashModel:
    """`windows[g]`: what KV group g can see (0: all). Token 0 ends the text, about once in `stop_every`.

    stateful: it also sees a digest of everything before, which is updated token by token and never written down.
    `contents`: what stands behind a prompt's tokens, by a row's seed, where several contents have one token id."""

    windows: tuple[int, ...] = (0,)
    vocab: int = 50
    stop_every: int = 20
    contents: dict[int, list[int]] = field(default_factory=dict, hash=False)
    stateful: bool = False

    def digest(self, views: list[list[int]], seed: int) -> int:
        """`views[g]`: the tokens group g reads, oldest first, ending with the last known token."""
        return mix(hash((seed, *map(tuple, views))) & MASK)

    def views(self, tokens: list[int]) -> list[list[int]]:
        """What each group should read when `tokens` are the context."""
        views = [tokens[-w:] if w else tokens for w in self.windows]
        return [*views, [self.state(tokens)]] if self.stateful else views

    def state(self, tokens: list[int]) -> int:
        """The recurrent state behind `tokens`."""
        value = 0
        for token in tokens:
            value = self.advance(value, token)
        return value

    def advance(self, state: int, token: int) -> int:
        """The state one token later."""
        return mix(state ^ (token + 1) * 0x9E3779B97F4A7C15 & MASK)

    def token(self, views: list[list[int]], seed: int) -> int:
        """The next token."""
        value = self.digest(views, seed)
        if value % self.stop_every == 0:
            return 0
        return 1 + (value >> 20) % (self.vocab - 1)

    def candidates(self, views: list[list[int]], width: int) -> list[tuple[int, float]]:
        """The `width` most likely tokens with their log-probabilities."""
        value = self.digest(views, 0)
        scores: dict[int, float] = {}
        while len(scores) < min(width, self.vocab):
            value = mix(value + 1)
            scores.setdefault(value % self.vocab, -((value >> 16) % 10007) / 1000)
        return sorted(scores.items(), key=lambda c: (-c[1], c[0]))

    def generate(self, prompt: list[int], seed: int, most: int) -> list[int]:
        """The right answer: up to `most` tokens, an end token included."""
        tokens = list(prompt)
        while len(tokens) - len(prompt) < most:
            tokens.append(self.token(self.views(tokens), seed))
            if tokens[-1] == 0:
                break
        return tokens[len(prompt) :]
