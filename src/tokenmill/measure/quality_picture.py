"""Figures of several models as one picture: size against divergence. Owns: an SVG without any library's help."""

from __future__ import annotations

import math
from html import escape

from tokenmill.measure.quality import Quality

_WIDTH, _HEIGHT, _EDGE = 720, 420, 70


def draw(found: list[Quality]) -> str:
    """An SVG: megabytes to the right, divergence from the base (logarithmic) upwards, one dot with a name per model."""
    names = short_names([one.model for one in found])
    others = [(name, one) for name, one in zip(names, found, strict=True) if one.kl is not None]
    sizes = [one.weight_bytes / 1e6 for one in found]
    lost = [max(one.kl or 0.0, 1e-6) for _, one in others] or [1e-3]
    right = max(sizes) * 1.05
    low, high = math.floor(math.log10(min(lost))), math.ceil(math.log10(max(lost)) + 1e-9)
    high = max(high, low + 1)

    def across(megabytes: float) -> float:
        return _EDGE + (_WIDTH - 2 * _EDGE) * megabytes / right

    def up(kl: float) -> float:
        part = (math.log10(max(kl, 1e-6)) - low) / (high - low)
        return _HEIGHT - _EDGE - (_HEIGHT - 2 * _EDGE) * part

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 20}" text-anchor="middle">weights (MB)</text>',
        f'<text x="18" y="{_HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 18 {_HEIGHT / 2})">'
        f"KL divergence from {escape(names[0])}</text>",
    ]
    for power in range(low, high + 1):
        y = up(10.0**power)
        lines.append(f'<path d="M{_EDGE} {y:.1f}H{_WIDTH - _EDGE}" stroke="#ddd"/>')
        lines.append(f'<text x="{_EDGE - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    for step in range(5):
        size = right * step / 4
        lines.append(f'<text x="{across(size):.1f}" y="{_HEIGHT - _EDGE + 20}" text-anchor="middle">{size:.3g}</text>')
    x = across(sizes[0])
    lines.append(f'<path d="M{x:.1f} {_EDGE}V{_HEIGHT - _EDGE}" stroke="#888" stroke-dasharray="4 4"/>')
    lines.append(f'<text x="{x:.1f}" y="{_EDGE - 8}" text-anchor="middle">{escape(names[0])}</text>')
    for name, one in others:
        x, y = across(one.weight_bytes / 1e6), up(one.kl or 0.0)
        lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="#1f6feb"/>')
        lines.append(f'<text x="{x + 8:.1f}" y="{y + 4:.1f}">{escape(name)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def short_names(names: list[str]) -> list[str]:
    """The last parts of paths, as many as tell them apart."""
    parts = [[part for part in name.split("/") if part not in ("", ".")] or [name] for name in names]
    return [_short(mine, [other for other in parts if other != mine]) for mine in parts]


def _short(mine: list[str], others: list[list[str]]) -> str:
    alone = (n for n in range(1, len(mine)) if all(other[-n:] != mine[-n:] for other in others))
    return "/".join(mine[-next(alone, len(mine)) :])
