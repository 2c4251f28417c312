"""The error tree. Owns: which failures a person can fix and how they are told. Knows nothing else.

TokenmillError
├── UserError          a person can fix it: the CLI prints the sentence, the server answers 4xx
│   ├── ParameterError   a bad request field (`param` names it)
│   ├── ModelError       a checkpoint or config that cannot be used (NoWeightsError: there are no weights)
│   ├── TooLargeError    over a limit that is stated in the message (ContextError: over the model's context)
│   └── BusyError        nothing is wrong with it: the same request may be accepted later
├── SequenceError      one sequence failed (NaN logits, a raising processor); others go on
└── EngineDeadError    the engine process is gone or hung (EngineLostError: while it was made ready; EngineFaultError:
                       by a mistake of this program)
"""

from __future__ import annotations

OWN_FAULT = "The request forbids every answer: "
"""The beginning of a sequence's error text if its own request caused the error: a person can fix it."""
TOO_FEW = "The request leaves fewer answers than it asks for: "
"""The same, if the request leaves some answers."""
OVER_LIMIT = "The request needs more than this engine grants: "
"""The same, if a limit of this program was hit: a simpler request fits."""
OUR_FAULT = "An internal failure: "
"""The beginning of a sequence's error text if this program caused the error: a retry may succeed."""
SHUTTING_DOWN = "The server is shutting down."
"""Why a request ends with its server."""


MOST_TOLD = 4000
"""The most characters of a message for people, whatever it quotes."""


class TokenmillError(Exception):
    """Base of every error this package raises on purpose."""


class UserError(TokenmillError, ValueError):
    """An error that the person can fix; the message says what is wrong and what to do."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message if len(message) <= MOST_TOLD else f"{message[:MOST_TOLD]} ...")
        self.param = param


class ParameterError(UserError):
    """A request field with an unusable value."""


class ModelError(UserError):
    """A model folder, config, tokenizer or tensor that cannot be used."""


class NotSharedError(ModelError):
    """A model cannot be shared out as --tensor-parallel-size and the like say."""


class UnevenError(NotSharedError):
    """Something of the model cannot be shared out among so many ranks."""

    def __init__(self, what: str, ranks: int) -> None:
        super().__init__(f"--tensor-parallel-size: {what} cannot be split over {ranks} ranks; another number may do.")


class NoExpertsError(NotSharedError):
    """Experts are to be distributed, and the model has none."""

    def __init__(self) -> None:
        super().__init__("--enable-expert-parallel: this model has no experts to distribute; leave it out.")


class UndividedError(NotSharedError):
    """Layers of the model read what others hold: none can be run without them."""

    def __init__(self, family: str) -> None:
        super().__init__(f"{family} cannot be split in stages: upper layers read what lower ones keep or choose.")


class NoWeightsError(ModelError):
    """A model folder without weight files; the files that it has are fine."""


class TooLargeError(UserError):
    """The request is over a stated limit (context, pool, list length, ...)."""


class ContextError(TooLargeError):
    """A prompt, or a prompt with its answer, is too long for the context. Clients act on the message's first
    sentence."""

    def __init__(
        self, context: int, prompt: int, new: int | None = None, *, exact: bool = True, text: bool = True
    ) -> None:
        """new: tokens that were asked for, if the prompt alone would fit. exact: the prompt was tokenised. text: the
        answer is text, which needs room for a token."""
        self.context, self.prompt, self.new = context, prompt, new
        if new is None:
            least = "" if exact else "at least "
            reason = f"the prompt has {least}{prompt} tokens, and at most {context - text} fit: shorten it"
        else:
            reason = (
                f"{prompt + new} tokens were asked for ({prompt} in the prompt, {new} for the answer): shorten the "
                f"prompt, or ask for at most {context - prompt} new ones"
            )
        super().__init__(
            f"This model's maximum context length is {context} tokens. However, {reason}, or raise --max-model-len.",
            param="prompt" if new is None else "max_tokens",
        )


class IdInUseError(ParameterError):
    """Another open request has this id."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"The request id {shown(request_id)} is in use: choose another one.", param="request_id")


class NotHereError(ParameterError):
    """What the request names is not here, or not any more."""


class BusyError(UserError):
    """There is no room, time or process for the request now; it may be accepted later."""


class SequenceError(TokenmillError):
    """One sequence cannot go on; the others are not affected."""


class EngineDeadError(TokenmillError):
    """The engine stopped answering. Requests end with this instead of waiting for ever."""


class EngineLostError(EngineDeadError):
    """The engine, or a process of it, ended before it was ready and gave no reason: another one may get further."""


class EngineFaultError(EngineDeadError):
    """A mistake of this program ended the load. The text is for logs, not for clients."""


def why(error: OSError | UnicodeDecodeError) -> str:
    """What is wrong with a file, without error numbers and byte positions."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    return error.strerror or str(error)


MOST_SHOWN = 100


def shown(value: object) -> str:
    """A value as text for a message; never long, whatever it is."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= MOST_SHOWN else text[:MOST_SHOWN] + "..."
