"""What an engine's first message (Ready) tells the server. Owns: making ModelInfo and the admission checks from it.

Must not know: engines' lives, HTTP.
"""

from __future__ import annotations

from tokenmill.core.pooled import Vectors
from tokenmill.engine.running.wire import Ready
from tokenmill.engine.steps.admission import Admission, needs_head
from tokenmill.server.backend import ModelInfo
from tokenmill.text.codec import Tokenizer


def learn_model(names: tuple[str, ...], ready: Ready) -> ModelInfo:
    """The facts of the loaded model."""
    facts = ready.facts
    return ModelInfo(
        names=names,
        root=facts["root"],
        vocab_size=facts["vocab_size"],
        max_model_len=facts["max_model_len"],
        tokenizer=Tokenizer.from_state(ready.tokenizer) if ready.tokenizer is not None else None,
        generation=ready.generation,
        max_rows=facts["max_rows"],
        priorities=facts["priorities"],
        details={**facts, "load_s": ready.load_s},
    )


def learn_admission(ready: Ready, tokenizer: Tokenizer | None) -> Admission:
    """The checks that the server makes before it sends a request to an engine."""
    facts = ready.facts
    admission = Admission(
        vocab_size=facts["vocab_size"],
        max_model_len=facts["max_model_len"],
        max_rows=facts["max_rows"],
        max_waiting=1,
        eos_ids=frozenset(ready.eos_ids),
        in_process=False,
        vectors=Vectors(**facts.get("vectors", {})),
    )
    if facts.get("headless"):
        admission.check_engine = needs_head
    if tokenizer is not None:
        admission.encoders = (lambda text: tokenizer.encode(text, add_special_tokens=False, allow_special=False),)
    return admission
