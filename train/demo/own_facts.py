"""What the demo says about itself. Owns: its figures, computed from the shape. Knows no tokens."""

from __future__ import annotations

from shapes import MAIN, parameters

COUNT = parameters(MAIN)
FACTS: dict[str, str] = {
    "me.params": f"{COUNT / 1e6:.1f} million",
    "me.params.all": f"{COUNT:,}",
    "me.params.zh": f"{round(COUNT / 1e4)}万",
    "me.context": f"{MAIN.positions:,}",
    "me.context.plain": str(MAIN.positions),
    "me.layers": str(MAIN.layers),
    "me.heads": str(MAIN.heads),
    "me.kv": str(MAIN.kv_heads),
    "me.dim": str(MAIN.dim),
    "me.vocab": f"{MAIN.vocab:,}",
    "me.vocab.plain": str(MAIN.vocab),
    "me.size": f"{2 * COUNT / 1e6:.0f}",
}
"""Slots of the authored answers: every figure is computed here and typed nowhere."""
