"""One of several strings. Owns: a Constraint that lets exactly these strings be said, in any tokenisation.

Must not know: models, sampling. Works on the exact bytes of tokens, so that merges across choices do not matter.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.core.errors import ParameterError

MAX_CHOICES = 10_000


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens by their bytes (several may share them), and the ids that end the text."""

    by_bytes: dict[bytes, list[int]]
    bytes_of: list[bytes]
    end_ids: tuple[int, ...]

    @classmethod
    def of(cls, bytes_of: list[bytes], special: set[int], end_ids: tuple[int, ...]) -> Vocabulary:
        """Special tokens cannot be part of a choice."""
        by_bytes: dict[bytes, list[int]] = {}
        for token, text in enumerate(bytes_of):
            if text and token not in special:
                by_bytes.setdefault(text, []).append(token)
        return cls(by_bytes, bytes_of, end_ids)


class ChoiceConstraint:
    """`remaining`: what is still to be said of each choice that agrees with the text so far."""

    def __init__(self, choices: list[str], vocabulary: Vocabulary) -> None:
        if not choices or len(choices) > MAX_CHOICES or not all(isinstance(c, str) and c for c in choices):
            raise ParameterError(
                f"structured_outputs.choice must be a list of 1 to {MAX_CHOICES} non-empty strings.",
                param="structured_outputs",
            )
        self.vocabulary = vocabulary
        self.remaining: list[bytes] = [c.encode() for c in dict.fromkeys(choices)]
        self.ended = False

    def allowed(self) -> set[int]:
        """Token ids that may come next."""
        ids: set[int] = set()
        by_bytes = self.vocabulary.by_bytes
        for rest in self.remaining:
            if not rest:
                ids.update(self.vocabulary.end_ids)
            for n in range(1, len(rest) + 1):
                ids.update(by_bytes.get(rest[:n], ()))
        return ids

    def mask(self) -> bytes | None:
        bits = bytearray((len(self.vocabulary.bytes_of) + 7) // 8)
        for token in self.allowed():
            bits[token >> 3] |= 1 << (token & 7)
        return bytes(bits)

    def accept(self, tokens: list[int]) -> None:
        for token in tokens:
            if token in self.vocabulary.end_ids:
                self.ended = True
                return
            text = self.vocabulary.bytes_of[token]
            self.remaining = [rest[len(text) :] for rest in self.remaining if rest.startswith(text)]

    def forced(self) -> list[int]:
        """The only token that can come next, if there is just one."""
        allowed = self.allowed() if not self.finished() else set()
        return list(allowed) if len(allowed) == 1 and not allowed & set(self.vocabulary.end_ids) else []

    def validate(self, tokens: list[int]) -> int:
        trial = self.fork()
        for n, token in enumerate(tokens):
            if token not in trial.allowed():
                return n
            trial.accept([token])
        return len(tokens)

    def finished(self) -> bool:
        return self.ended or not any(self.remaining)

    def fork(self) -> ChoiceConstraint:
        twin = ChoiceConstraint.__new__(ChoiceConstraint)
        twin.vocabulary, twin.remaining, twin.ended = self.vocabulary, list(self.remaining), self.ended
        return twin
