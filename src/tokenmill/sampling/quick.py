"""Lines that a backend chooses by itself. Owns: what it can, and handing it masks and draws in one transfer.

Masks, temperatures, and what min-p, top-k and top-p leave, are all that most requests want: for those a backend has
`Kernels.choose`, which gives what sampler.py's many operations give. Must not know: how cuts are found, requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tokenmill.compute.forward import DRAWN, Cuts, Draws
from tokenmill.sampling import table as features
from tokenmill.sampling.sampler import Pending, Sampled, measure_logprobs
from tokenmill.sampling.steps import BY_NAME, CUTS
from tokenmill.sampling.table import SamplingTable

if TYPE_CHECKING:
    from tokenmill.compute.forward import Kernels

PLAIN = features.SAMPLED | features.MASKED | features.LOGPROBS
ALIGNED = 4


def choose_quickly(
    logits: Tensor, rows: list[int], at: tuple[Tensor, Tensor], masks: Mapping[int, bytes], table: SamplingTable,
    kernels: Kernels,
) -> tuple[Sampled, Tensor] | None:  # fmt: skip
    """logits [n, V] of `rows` -> a token per line, and its id, or ~id if it is bad; None: the backend cannot do it. No
    row may want more than PLAIN and, if the backend cuts, CUTS (choose.py ensures that).

    at: row ids and positions of the lines' last known tokens [n] int64, on the device. masks: packed bits by line."""
    bits = [table.bits[row] for row in rows]
    used = 0
    for some in bits:
        used |= some
    found: tuple[Tensor, Tensor, Tensor] | None
    if not masks and not used & features.SAMPLED:
        found = kernels.greedy(logits)
    else:
        draws = None
        if used & features.SAMPLED:
            draws = _draws(at, table, used & features.SAMPLED and used & CUTS)
        all_drawn = not masks and all(some & features.SAMPLED for some in bits)
        words, packed = (None, None) if all_drawn else _send(bits, masks, table.vocab_size, logits.device)
        found = kernels.choose(logits, words, packed, draws)
    if found is None:
        return None
    ids, marked, largest = found
    pending = Pending(largest, largest)
    if used & features.LOGPROBS:
        measure_logprobs(logits, ids, rows, table, pending)
    return Sampled(ids, marked < 0, pending), marked


def _draws(at: tuple[Tensor, Tensor], table: SamplingTable, cut: int) -> Draws:
    """What the backend needs to draw. cut: the bits of the cuts that any line asks for."""
    min_p, top_k, top_p = (cut & BY_NAME[name].bit for name in ("min_p", "top_k", "top_p"))
    cuts = None
    if cut:
        cuts = Cuts(table.log_min_p if min_p else None, table.top_k if top_k else None, table.top_p if top_p else None)
    return Draws(*at, table.stream, table.num_prompt, table.inverse_temperature, cuts)


def _send(bits: list[int], masks: Mapping[int, bytes], size: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Words [n] and masks [m, W] on the device, as `Kernels.choose` takes them; equal masks are sent once."""
    width, padded = -(-size // 32), -(-len(bits) // ALIGNED) * ALIGNED
    places: dict[int, int] = {}
    lists: list[bytes] = []
    words = [DRAWN if some & features.SAMPLED else 0 for some in bits]
    for line, mask in masks.items():
        place = places.get(id(mask))
        if place is None:
            lists.append(mask)
            place = places[id(mask)] = len(lists)
        words[line] += place
    host = torch.empty(padded + width * len(lists), dtype=torch.int32, pin_memory=device.type == "cuda")
    view = host.numpy().data.cast("B")
    view[: 4 * len(words)] = torch.tensor(words, dtype=torch.int32).numpy().tobytes()
    for i, mask in enumerate(lists):
        start, end = 4 * (padded + width * i), 4 * (padded + width * (i + 1))
        if len(mask) < 4 * width:  # ids behind a mask's end are forbidden
            view[start + len(mask) : end] = bytes(4 * width - len(mask))
            view[start : start + len(mask)] = mask
        else:
            view[start:end] = mask[: 4 * width]
    sent = host.to(device, non_blocking=device.type == "cuda")
    return sent[: len(words)], sent[padded:].view(len(lists), width) if lists else None


def compile_choices(logits: Tensor, row_ids: Tensor, table: SamplingTable, kernels: Kernels) -> None:
    """Compile all of the backend's ways of choosing for so many lines; the chosen tokens are not used."""
    kernels.greedy(logits)
    if kernels.chooses:  # other ways than the backend's own draw use this
        kernels.least_kept(logits.float(), table.top_k[row_ids], table.top_p[row_ids])
    words = torch.ones_like(row_ids, dtype=torch.int32)
    mask = words.new_zeros(1, -(-table.vocab_size // 32))
    kernels.choose(logits, words, mask, _draws((row_ids, row_ids), table, CUTS if kernels.chooses else 0))
