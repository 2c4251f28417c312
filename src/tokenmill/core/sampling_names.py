"""Names of vLLM's SamplingParams that are not fields here. Owns: what becomes of each of them.

Must not know: the fields, requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.core.errors import ParameterError

OLDER = {"guided_decoding": "structured_outputs"}
"""Older names of fields."""

HARMLESS = {
    "skip_clone": "only about speed: parameters are never changed, so none are copied",
    "flat_logprobs": "only about memory: log-probabilities come as one dict per token",
}
"""Accepted without effect, because nothing is lost."""

REFUSED = {
    "extra_args": "it is read by plugins, and there are none: give logits_processors=[f], whose f may hold anything",
    "repetition_detection": "ends at repetitions are not built: penalties prevent them",
    "prompt_adapter_request": "prompt adapters are not built",
}
"""Refused unless their value asks for nothing."""


def fields_alone(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keep only our own fields: rename older names, drop harmless ones, and refuse values that would be lost."""
    fields: dict[str, Any] = {}
    for name, value in given.items():
        if name in HARMLESS:
            continue
        if name in REFUSED:
            if value not in (None, False) and value != {}:
                raise ParameterError(f"SamplingParams: {name!r} cannot be used: {REFUSED[name]}.", param=name)
            continue
        field = OLDER.get(name, name)
        if field in fields or (field != name and given.get(field) is not None):
            raise ParameterError(f"{name} is an older name of {field}: give one of them.", param=name)
        fields[field] = value
    return fields
