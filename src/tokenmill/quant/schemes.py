"""What --quantization accepts. Owns: the names of schemes, and how a second scheme for the output head is appended.

Must not know: torch (options are read before it is imported), weights.
"""

from __future__ import annotations

from tokenmill.core.errors import ParameterError, shown

FP8 = "fp8"
AT_LOAD = {
    "int8": (8, 0), "int4": (4, 0), "int4-g32": (4, 32), "int4-g64": (4, 64), "int4-g128": (4, 128), "w4a8": (4, 128),
}  # fmt: skip
"""Schemes besides fp8: bits of a weight, and columns per float16 scale (0: the backend chooses)."""
ROUNDS_INPUTS = ("w4a8",)
"""Schemes that let a backend round activations to 8 bits, row by row, as `fp8` does."""
_HEAD = ",head="


def check_scheme(quantization: str) -> tuple[str, str]:
    """Split a scheme into that of the matrices and that of the output head ("": none given). Unknown schemes are
    refused."""
    scheme, behind, head = quantization.partition(_HEAD)
    known = (FP8, *AT_LOAD, "none")
    if scheme not in known or (behind and head not in known):
        raise ParameterError(
            f"quantization {shown(quantization)}: weights are quantised at load to {', '.join(known[:-1])} (and, for "
            f"another output head, `fp8{_HEAD}none` or the like).",
            param="quantization",
        )
    return scheme, head


def head_scheme(quantization: str | None) -> str | None:
    """The scheme of the output head: the one given by `,head=`, else one of at least 8 bits, because the head's
    outliers matter."""
    if quantization is None:
        return None
    scheme, _, head = quantization.partition(_HEAD)
    return head or ("int8" if AT_LOAD.get(scheme, (8, 0))[0] == 4 else scheme)
