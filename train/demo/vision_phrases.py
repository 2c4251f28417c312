"""How people ask for a place, a colour or a shape in a picture. Owns: composed wordings. Knows no picture.

With a short list of wordings a model learns the list: asked otherwise for a place, it names the shape. Here the verb
that opens a question is the same for all three, and only the word for what is wanted differs.
"""

from __future__ import annotations

import random

from grammar import expand, parse

LEAD = "{Show me|Tell me|Say|Name|Give me|Let me know|Point out|I want to know|Find out|Describe|State|Look for}"
TAIL = "{ in the {picture|image|drawing}| here| on this image| that you see| of the picture|||||}"
THING = "{the [n]|the [n]|that [n]|our [n]}"
FORMS: dict[str, list[str]] = {
    "where": [
        LEAD + " the {place|position|location|part of the picture|corner or place|exact place} of [t]",
        LEAD + " where {[t] is|you see [t]|I find [t]|one can see [t]}" + TAIL,
        LEAD + " the {place|part|area|side|region} {that [t] has|where [t] is|with the [n]}",
        "{Where|In which {place|part|corner|area|region}|At {which|what} place} {is|lies|stands|sits|was} [t]" + TAIL,
        "{Where|In which {place|part|corner}|At what place} {do I see|can I find|do we find|should I look for} [t]"
        + TAIL,
        "{Top or bottom, left or right|Which place|Which corner}: [t]",
        "I {cannot find|am searching|look for|have lost} [t]{. Where is it|, where is it|. Which place has it}",
        "[t]{ - where| is where| is at which place|: position|, its place}",
    ],
    "colour": [
        LEAD + " the {colour|color|shade|paint} of [t]",
        LEAD + " {which|what} {colour|color} [t] {has|is}" + TAIL,
        "{What|Which} {colour|color} {is|has|was} [t]" + TAIL,
        "{How|With what colour} is [t] {painted|coloured|drawn}",
        "[t]{ - which colour|: colour|, its colour| is of what colour}",
    ],
    "shape": [
        LEAD + " the {shape|form|figure} of [t]",
        LEAD + " {which|what} {shape|form} [t] {has|is}" + TAIL,
        "{What|Which} {shape|form|figure} {is|has} [t]" + TAIL,
        "{Is|Would you call} [t] a circle, a square, a triangle or a star",
        "[t]{ - which shape|: shape|, its shape| is of what shape}",
    ],
}
LEAD_ZH = "{请问|告诉我|请说|你看|帮我看看|我想知道|说说|指出|}"
FORMS_ZH = {
    "where": [
        LEAD_ZH + "[n]{在哪里|在哪儿|在什么位置|的位置是哪里|在图的哪个角落|在图中什么地方|位于哪里}",
        LEAD_ZH + "{图里|图上|画面中|}{哪里|哪个位置|什么地方}{有|能看到|画着}[n]",
        "{找一下|找找|我找不到}[n]{，它在哪里|，在什么位置|}",
    ],
    "colour": [LEAD_ZH + "[n]{是什么颜色|的颜色是什么|是哪种颜色|涂的什么颜色}"],
    "shape": [LEAD_ZH + "[n]{是什么形状|的形状是什么|是哪种形状|是圆形还是别的}"],
}
HELD = ("Whereabouts is the", "Show me the spot of the")
"""Openings of the evaluation."""


def asked(rng: random.Random, kind: str, named: str, chinese: bool = False) -> str:
    """A question of a kind for what is named."""
    forms = (FORMS_ZH if chinese else FORMS)[kind]
    form = rng.choice(forms).replace("[t]", THING)
    text = expand(parse(form), rng, lambda _: named)
    if chinese:
        return text + rng.choice(["？", "？", "。", ""])
    text = text[0].upper() + text[1:] if rng.random() < 0.8 else text
    return text + rng.choice(["?", ".", "", "?"])
