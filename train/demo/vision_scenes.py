"""Pictures of shapes and talks on them. Owns: rendered scenes, questions with their answers. Knows no model."""

from __future__ import annotations

import random

import numpy as np
from vision_phrases import asked

SIZE, TOKENS = 64, 64
SHAPES = ["circle", "square", "triangle", "star"]
COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 160, 50),
    "blue": (40, 70, 220),
    "yellow": (240, 215, 40),
    "orange": (245, 140, 30),
    "purple": (140, 50, 170),
    "black": (20, 20, 20),
    "pink": (250, 150, 190),
}
PLACES = {
    "in the middle": (32, 32),
    "at the top left": (15, 15),
    "at the top right": (49, 15),
    "at the bottom left": (15, 49),
    "at the bottom right": (49, 49),
}
SIZES = {"small": 7, "large": 13}
BACKGROUNDS = [(255, 255, 255), (235, 235, 235), (205, 215, 225), (250, 245, 225)]
SHAPE_ZH = {"circle": "圆形", "square": "正方形", "triangle": "三角形", "star": "星形"}
COLOUR_ZH = {
    "red": "红色",
    "green": "绿色",
    "blue": "蓝色",
    "yellow": "黄色",
    "orange": "橙色",
    "purple": "紫色",
    "black": "黑色",
    "pink": "粉色",
}
PLACE_ZH = {
    "in the middle": "中间",
    "at the top left": "左上角",
    "at the top right": "右上角",
    "at the bottom left": "左下角",
    "at the bottom right": "右下角",
}
COUNT = {1: "one", 2: "two", 3: "three", 4: "four"}
COUNT_ZH = {1: "一", 2: "两", 3: "三", 4: "四"}
Object = tuple[str, str, str, str]  # size, colour, shape, place
MARK = "<|vision_start|>" + "<|image_pad|>" * TOKENS + "<|vision_end|>\n"


def mask_of(shape: str, centre: tuple[int, int], radius: int) -> np.ndarray:
    """The pixels [64, 64] of a shape."""
    y, x = np.mgrid[0:SIZE, 0:SIZE]
    dx, dy = x - centre[0], y - centre[1]
    if shape == "circle":
        return dx**2 + dy**2 <= radius**2
    if shape == "square":
        return (abs(dx) <= radius * 0.85) & (abs(dy) <= radius * 0.85)
    if shape == "triangle":
        return (dy <= radius * 0.8) & (dy >= -radius) & (abs(dx) <= (dy + radius) * 0.55)
    angle = np.arctan2(dy, dx) + np.pi / 2
    turn = np.abs((angle / (2 * np.pi / 5) + 0.5) % 1 - 0.5) * 2
    return np.hypot(dx, dy) <= radius * (1.1 - 0.68 * turn)


MASKS: dict[tuple[str, str, str, int, int], np.ndarray] = {}


def draw(objects: list[Object], rng: random.Random) -> np.ndarray:
    """An image [64, 64, 3] of the objects, each shifted by up to two pixels."""
    image = np.empty((SIZE, SIZE, 3), np.uint8)
    image[:] = rng.choice(BACKGROUNDS)
    for size, colour, shape, place in objects:
        sx, sy = rng.randint(-2, 2), rng.randint(-2, 2)
        key = (size, shape, place, sx, sy)
        if key not in MASKS:
            cx, cy = PLACES[place]
            MASKS[key] = mask_of(shape, (cx + sx, cy + sy), SIZES[size])
        shade = rng.randint(-12, 12)
        image[MASKS[key]] = [min(255, max(0, c + shade)) for c in COLOURS[colour]]
    return image


MANY = (1, 2, 2, 3, 3, 4)
"""Objects of a training scene: with one alone, nothing must be told apart."""


def scene(rng: random.Random, sizes: tuple[int, ...] = (1, 1, 2, 2, 3, 4)) -> list[Object]:
    """One to four objects at different places."""
    places = rng.sample(list(PLACES), rng.choice(sizes))
    return [(rng.choice(list(SIZES)), rng.choice(list(COLOURS)), rng.choice(SHAPES), p) for p in places]


def phrase(item: Object, place: bool = True) -> str:
    """`a small red circle at the top left`."""
    size, colour, shape, where = item
    return f"a {size} {colour} {shape}" + (f" {where}" if place else "")


Asked = tuple[str, str, str, str]
"""Kind of a question, the question, its answer and the expression that the answer must meet."""
KINDS = ("count", "yesno", "describe", "colour", "shape", "where")
WHERE = ["Where is the [n]?", "In which place is the [n]?"]
MORE_WHERE = [
    "Where do you see the [n]?",
    "Where is the [n] in the picture?",
    "What is the place of the [n]?",
    "where's the [n]",
]
MORE_WHERE += [
    "Tell me where the [n] is.",
    "The [n] is where?",
    "Find the [n].",
    "In which part of the image is the [n]?",
]
MORE_WHERE += [
    "At which place is the [n]?",
    "Can you say where the [n] is?",
    "Position of the [n]?",
    "In what place is the [n]?",
]
MORE_WHERE += [
    "Which place has the [n]?",
    "I am looking for the [n]. Where is it?",
    "In which corner or where is the [n]?",
]
HELD_WHERE = ["Whereabouts is the [n]?", "Show me the spot of the [n]."]
WHERE_ZH = ["[n]在哪里？"]
MORE_WHERE_ZH = [
    "[n]在什么位置？",
    "[n]在哪儿？",
    "请问[n]在哪里？",
    "[n]在图的什么地方？",
    "哪里有[n]？",
    "[n]的位置是哪里？",
]
COLOUR = ["What colour is the [n]?", "Which color does the [n] have?"]
MORE_COLOUR = [
    "What is the colour of the [n]?",
    "The [n] is of which colour?",
    "Tell me the color of the [n].",
    "the [n], what colour?",
]
SHAPE = ["What shape is [n]?", "Which shape is the [n] object?"]
MORE_SHAPE = [
    "What is the shape of the [n] thing?",
    "The [n] one has which shape?",
    "What is [n]?",
    "Name the [n] shape.",
]
AT = ["What is [p]?", "What do you see [p]?", "Which object is [p]?", "What is there [p]?", "Describe what is [p]."]


def _where(rng: random.Random, objects: list[Object], item: Object, zh: bool, more: bool, held: bool) -> Asked | None:
    """Where an object is, named so that no other one is meant; nothing where two look alike."""
    size, colour, shape, place = item
    alike = [o for o in objects if o[1:3] == item[1:3]]
    if len(alike) > 1:
        return None
    named = shape if sum(o[2] == shape for o in objects) == 1 else f"{colour} {shape}"
    if more and rng.random() < 0.5:
        named = rng.choice([f"{colour} {shape}", f"{colour} {shape}", f"{size} {colour} {shape}"])
        if sum(o[1] == colour for o in objects) == 1 and rng.random() < 0.3:
            named = f"{colour} {rng.choice(['object', 'shape', 'one', 'thing'])}"
    made = more and rng.random() < MADE
    if zh:
        shown = f"{COLOUR_ZH[colour]}的{SHAPE_ZH[shape]}"
        if made:
            return "where", asked(rng, "where", shown, True), f"在{PLACE_ZH[place]}。", PLACE_ZH[place]
        form = rng.choice(WHERE_ZH + MORE_WHERE_ZH if more and rng.random() < 0.6 else WHERE_ZH)
        return "where", form.replace("[n]", shown), f"在{PLACE_ZH[place]}。", PLACE_ZH[place]
    if made:
        return "where", asked(rng, "where", named), f"It is {place}.", place
    form = rng.choice(HELD_WHERE if held else WHERE if not more or rng.random() < 0.5 else MORE_WHERE)
    return "where", form.replace("[n]", named), f"It is {place}.", place


def _look(rng: random.Random, objects: list[Object], item: Object, kind: str, zh: bool, more: bool) -> Asked:
    """The colour or the shape of an object, named by the other one, or by its place where that is not enough."""
    _, colour, shape, place = item
    by_colour = kind == "shape"
    word, word_zh = (shape, SHAPE_ZH[shape]) if by_colour else (colour, COLOUR_ZH[colour])
    answer = f"是{word_zh}。" if zh else f"It is a {word}." if by_colour else f"It is {word}."
    must = word_zh if zh else word
    same = [o for o in objects if (o[1] == colour if by_colour else o[2] == shape)]
    if len(same) > 1 and zh:
        return kind, f"{PLACE_ZH[place]}的图形是什么{'形状' if by_colour else '颜色'}？", answer, must
    if len(same) > 1:
        return (
            kind,
            rng.choice([f"What {kind} is the object {place}?", f"Which {kind} do you see {place}?"]),
            answer,
            must,
        )
    if more and rng.random() < MADE:
        named = f"{colour} {rng.choice(['one', 'object', 'thing', 'figure'])}" if by_colour else shape
        named_zh = f"{COLOUR_ZH[colour]}的{rng.choice(['图形', '东西', '那个'])}" if by_colour else SHAPE_ZH[shape]
        return kind, asked(rng, kind, named_zh if zh else named, zh), answer, must
    if zh:
        q = f"{COLOUR_ZH[colour]}的是什么形状？" if by_colour else f"{SHAPE_ZH[shape]}是什么颜色？"
        return kind, q, answer, must
    plain_, others = (SHAPE, MORE_SHAPE) if by_colour else (COLOUR, MORE_COLOUR)
    form = rng.choice(others if more and rng.random() < 0.4 else plain_)
    return kind, form.replace("[n]", colour if by_colour else shape), answer, must


def _count(rng: random.Random, objects: list[Object], zh: bool) -> Asked:
    n = len(objects)
    if zh:
        return "count", rng.choice(["图里有几个图形？", "有多少个图形？"]), f"有{COUNT_ZH[n]}个图形。", COUNT_ZH[n]
    q = rng.choice(["How many objects are there?", "How many shapes do you see?", "Count the shapes."])
    return "count", q, f"There {'is' if n == 1 else 'are'} {COUNT[n]} object{'' if n == 1 else 's'}.", COUNT[n]


def _yesno(rng: random.Random, objects: list[Object], item: Object, zh: bool) -> Asked:
    wanted = item if rng.random() < 0.5 else ("small", rng.choice(list(COLOURS)), rng.choice(SHAPES), "")
    there = any(o[1:3] == wanted[1:3] for o in objects)
    if zh:
        q = f"图里有{COLOUR_ZH[wanted[1]]}的{SHAPE_ZH[wanted[2]]}吗？"
        return "yesno", q, "有。" if there else "没有。", "^有" if there else "没有"
    return "yesno", f"Is there a {wanted[1]} {wanted[2]}?", "Yes." if there else "No.", "^Yes" if there else "^No"


def _described(rng: random.Random, objects: list[Object]) -> Asked:
    order = sorted(objects, key=lambda o: list(PLACES).index(o[3]))
    text = ", ".join(phrase(o) for o in order[:-1]) + (" and " if len(order) > 1 else "") + phrase(order[-1])
    q = rng.choice(["Describe the image.", "What do you see?", "What is in the picture?", "Describe this picture."])
    return "describe", q, f"I see {text}.", f"I see {text}."


def question(
    rng: random.Random,
    objects: list[Object],
    kind: str | None = None,
    chinese: float = 0.25,
    more: bool = False,
    held: bool = False,
    item: Object | None = None,
) -> Asked:
    """A question of a kind, in Chinese in a share of the cases; `more` has the wordings that only training sees."""
    kind = kind or rng.choice(KINDS)
    item = item or rng.choice(objects)
    zh = rng.random() < chinese and not held
    if kind == "at":
        return kind, rng.choice(AT).replace("[p]", item[3]), f"It is {phrase(item, False)}.", item[2]
    if kind == "where":
        return _where(rng, objects, item, zh, more, held) or _count(rng, objects, zh)
    if kind in ("colour", "shape"):
        return _look(rng, objects, item, kind, zh, more)
    if kind == "count":
        return _count(rng, objects, zh)
    return _yesno(rng, objects, item, zh) if kind == "yesno" else _described(rng, objects)


MADE = 0.5
"""Share of the training questions for a place, a colour or a shape that are put together."""
CHINESE = 0.45
"""Chinese questions in training: asked less often, they were nearly all of the wrong answers."""


TAUGHT = ("count", "yesno", "yesno", "describe", "colour", "colour", "colour", *["where"] * 6, "at", "shape", "shape")
"""Kinds of a training talk: where a shape must be found among others (colour, where), learning takes longest."""


def talk(rng: random.Random, objects: list[Object], turns: int = 5) -> list[dict]:
    """Several questions on one image, as one conversation; a description comes last.

    After a description every other answer can be copied from its text, and nothing is learned from the image.
    """
    kinds = sorted(rng.sample(TAUGHT, turns), key=lambda kind: kind == "describe")
    messages: list[dict] = []
    # Each object has its turn to be looked for: two places of one picture must be told apart.
    turn = rng.sample(objects, len(objects))
    for at, kind in enumerate(kinds):
        _, q, a, _ = question(rng, objects, kind, CHINESE, True, item=turn[at % len(turn)])
        messages += messages_of(q, a) if not messages else messages_of(q, a, "")
    return messages


def messages_of(q: str, a: str, image: str = MARK) -> list[dict]:
    """The conversation of one image question with its 64 image tokens."""
    return [{"role": "user", "content": image + q}, {"role": "assistant", "content": a}]
