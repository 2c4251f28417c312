"""Objectives for latency. Owns: reading them, and the cheapest set-up that is predicted to meet them.

Must not know: terminals.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from tokenmill.core.config import EngineConfig, override
from tokenmill.core.errors import ParameterError, UserError
from tokenmill.measure import plan as planning
from tokenmill.measure.devices import efficiency_of, speeds, table

METRICS = ("ttft", "tpot", "itl", "e2e")
_TERM = re.compile(r"(\w+)(?:\s*=\s*(\d+(?:\.\d+)?)\s*(ms|s)|:(\d+(?:\.\d+)?))")
_RANKS = (1, 2, 4, 8)
_SCHEMES = (None, "int8", "int4")


def read_slo(text: str) -> dict[str, float]:
    """Read `ttft=500ms,tpot=50ms`, or vLLM's spelling `ttft:500 tpot:50`, as milliseconds by metric."""
    found = {}
    terms = text.split() if "=" not in text and "," not in text else text.split(",")
    for term in terms or [""]:
        match = _TERM.fullmatch(term.strip())
        name = {"e2el": "e2e"}.get(match[1], match[1]) if match is not None else ""
        value = 0.0 if match is None else float(match[2] or match[4])
        if match is None or name not in METRICS or value <= 0:
            raise ParameterError(
                f"--slo takes terms such as ttft=500ms,tpot=50ms (of {', '.join(METRICS)}; ms or s), got {text!r}."
            )
        found[name] = value * (1000 if match[3] == "s" else 1)
    return found


def cheapest(config: EngineConfig, slo: dict[str, float], users: int, setup: planning.Setup) -> dict[str, Any]:
    """The set-up of the table with the lowest price per hour that serves this many users within the objective, each
    with the longest of the prompts asked about.

    ttft is that of a prompt that joins decoding users; waiting for other prompts is not modelled. Quantisation is tried
    only if the options do not set it."""
    schemes = (config.model.quantization,) if config.model.quantization else _SCHEMES
    context = max(setup.contexts or planning.DEFAULT_CONTEXTS[:1])
    load = f"{users} users with prompts of {context} tokens"
    planners: dict[tuple[str | None, int, str], planning.Planner] = {}
    offers = []
    for device in table().devices.values():
        if device.usd_per_hour is None:
            continue
        for ranks in _RANKS:
            for scheme in schemes:
                key = (scheme, ranks, device.kind)
                try:
                    if key not in planners:
                        asked = override(config, "model", quantization=scheme)
                        planners[key] = planning.read_model(asked, device.kind, ranks)
                    here = replace(setup, device=device, ranks=ranks, efficiency=efficiency_of(device))
                    offer = _offer(planners[key], here, slo, users, context)
                except UserError:
                    continue  # heads that do not divide, or a type that this device does not have
                if offer is not None:
                    offers.append({**offer, "quantization": scheme})
    if not offers:
        return {"device": None, "sentences": [f"No set-up of the table is predicted to meet this objective: {load}."]}
    best = _lowest(offers)
    sentences = [f"Cheapest of the table for {load}: {_said(best)}. A prompt's wait for others is not counted."]
    return {**best, "sentences": sentences}


def _lowest(offers: list[dict[str, Any]]) -> dict[str, Any]:
    """The lowest price; among equal ones, the one that rounds least."""
    order = {scheme: place for place, scheme in enumerate(_SCHEMES)}
    return min(offers, key=lambda offer: (offer["usd_per_hour"], order.get(offer["quantization"], 0)))


def _said(offer: dict[str, Any]) -> str:
    scheme = f" with --quantization {offer['quantization']}" if offer["quantization"] else ""
    times = f"TTFT {offer['ttft_ms']:.0f} ms, TPOT {offer['tpot_ms']:.1f} ms"
    return f"{offer['ranks']} x {offer['device']}{scheme}, {offer['usd_per_hour']:.2f} dollars an hour ({times})"


def _offer(
    planner: planning.Planner, setup: planning.Setup, slo: dict[str, float], users: int, context: int
) -> dict[str, Any] | None:
    """This set-up, if the model and the users fit and the objective is met."""
    memory = planning.layouts(planner, setup.device)
    if memory.free < 0 or not all(memory.blocks):
        return None
    if planning.max_batch(planner, memory, context + setup.output) < users:
        return None
    point = planning.point(planner, setup, speeds(setup.device, planner.dtype, setup.efficiency), context, users)
    tpot, ttft = point["tpot_ms"], point["ttft_ms"] + point["tpot_ms"]
    reached = {"ttft": ttft, "tpot": tpot, "itl": tpot, "e2e": ttft + tpot * setup.output}
    if any(reached[metric] > limit for metric, limit in slo.items()):
        return None
    price = (setup.device.usd_per_hour or 0.0) * setup.ranks
    return {
        "device": setup.device.name,
        "ranks": setup.ranks,
        "users": users,
        "context": context,
        "usd_per_hour": price,
        "ttft_ms": round(ttft, 3),
        "tpot_ms": tpot,
    }
