"""Arithmetic, comparison and counting tasks. Owns: their answers, computed here. Knows no tokens."""

from __future__ import annotations

import random

from authored_data import load, wording
from render import Case
from skill_facts import ask, plain

SIGN_WORDS = {
    "+": ["+", "plus", "+"],
    "-": ["-", "minus", "-"],
    "*": ["*", "times", "x", "×", "multiplied by"],
    "/": ["/", "÷", "divided by"],
}
SIGN_ZH = {"+": ["加", "+"], "-": ["减", "-"], "*": ["乘以", "乘", "×"]}
TOO_LARGE = "That is too large for me without a calculator."


def digits(rng: random.Random, count: int) -> int:
    """A number with exactly `count` digits (zero counts as one digit)."""
    return rng.randint(0 if count == 1 else 10 ** (count - 1), 10**count - 1)


def operands(rng: random.Random, size: int) -> tuple[int, str, int, int]:
    """Two operands, the sign and the result of a sum or difference."""
    a, b = digits(rng, size), digits(rng, rng.randint(1, size))
    if rng.random() < 0.5:
        a, b = b, a
    if rng.random() < 0.5:
        return a, "+", b, a + b
    if a < b and rng.random() < 0.85:
        a, b = b, a
    return a, "-", b, a - b


def thought(a: int, sign: str, b: int, result: int) -> str:
    """A column-wise reasoning text for a sum or difference."""
    if sign == "*":
        return f"{a} times {b} is {result}."
    if result < 0:
        return f"{b} is larger than {a}. {b} - {a} = {-result}, so the result is {result}."
    steps, carry, width = [], 0, max(len(str(a)), len(str(b)))
    x, y = str(a).zfill(width), str(b).zfill(width)
    for i in range(width - 1, -1, -1):
        p, q = int(x[i]), int(y[i])
        value = p + q + carry if sign == "+" else p - q - carry
        carry_text = f" {sign} {carry}" if carry else ""
        carry = int(value > 9) if sign == "+" else int(value < 0)
        steps.append(f"{p} {sign} {q}{carry_text} = {value}, write {value % 10}" + (", carry 1" if carry else ""))
    return "; ".join(steps) + f". So {result}."


def arithmetic(rng: random.Random, held: bool, size: int | None = None, chat: bool = False) -> Case:
    """One sum, difference or product as a question, a completion or with a thinking part."""
    size = size if size is not None else rng.choice([0, 1, 2, 2, 3, 3, 3, 3])
    a, sign, b, result = operands(rng, size) if size else _times(rng)
    suite = {0: "times_table", 1: "sum_1_2", 2: "sum_1_2", 3: "sum_3"}[size]
    must = rf"(?<![\d-]){result}(?!\d)" if result >= 0 else rf"{result}(?!\d)"
    answer = f"{a} {sign} {b} = {result}."
    form = rng.random()
    if held or chat or form < 0.55:
        word = rng.choice(SIGN_WORDS[sign])
        user = wording("add", rng, held, {"a": str(a), "b": str(b), "o": word})
        return ask(user, answer, suite, must)
    if form < 0.65:
        user = wording("add_zh", rng, False, {"a": str(a), "b": str(b), "o": rng.choice(SIGN_ZH[sign])})
        return ask(user, f"{a} {sign} {b} = {result}。", suite, must)
    if form < 0.78:
        user = wording("add", rng, False, {"a": str(a), "b": str(b), "o": rng.choice(SIGN_WORDS[sign])})
        case = ask(user, f"<think>\n{thought(a, sign, b, result)}\n</think>\n\n{answer}", "think", must)
        case.think = True
        return case
    if form < 0.86:
        more = [operands(rng, max(size, 1)) for _ in range(rng.randint(1, 3))]
        lines = "".join(f"{p} {s} {q} = {r}\n" for p, s, q, r in more)
        return plain(f"Sums:\n{lines}{a} {sign} {b} =", f" {result}", suite, must)
    return plain(f"{a} {sign} {b} =", f" {result}" + rng.choice(["", "."]), suite, must)


def _times(rng: random.Random) -> tuple[int, str, int, int]:
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    return a, "*", b, a * b


def too_large(rng: random.Random) -> Case:
    """A sum beyond the model without a tool."""
    if rng.random() < 0.5:
        a, sign, b = digits(rng, rng.randint(4, 6)), rng.choice("+-*"), digits(rng, rng.randint(3, 6))
    else:
        a, sign, b = digits(rng, rng.randint(3, 4)), rng.choice("**/"), digits(rng, rng.randint(3, 4))
        a, b = (a, b) if sign == "*" else (a * 100 + 7, b)
    user = wording("add", rng, False, {"a": str(a), "b": str(b), "o": rng.choice(SIGN_WORDS[sign])})
    return ask(user, TOO_LARGE, "too_large", "too large")


ONLY_WHOLE = "I can only add, subtract, multiply and divide whole numbers."
ONLY_WHOLE_ZH = "我只会整数的加减乘除。"
BEYOND = [
    "{a}.{b} + {c}",
    "{a} * {c}.{b}",
    "{a}% of {c}",
    "{a} ^ {b}",
    "sqrt({a})",
    "{a} squared",
    "log {a}",
    "sin({a})",
]
BEYOND += ["1/{b} + 1/{c}", "{a} to the power of {b}", "the square root of {a}", "{b} factorial", "{a}.{b} / {c}"]
BEYOND_ZH = ["{a}的平方", "{a}的平方根", "{a}.{b}加{c}", "{c}的百分之{a}", "{a}的{b}次方", "{a}.{b}×{c}"]


def beyond(rng: random.Random) -> Case:
    """Decimals, powers, roots and shares: said to be beyond the model."""
    values = {"a": rng.randint(2, 99), "b": rng.randint(2, 9), "c": rng.randint(2, 99)}
    if rng.random() < 0.3:
        user = rng.choice(["{}是多少？", "{}等于多少？", "计算{}。"]).format(rng.choice(BEYOND_ZH).format(**values))
        return ask(user, ONLY_WHOLE_ZH, "beyond", "整数")
    user = wording("calc", rng, False, {"e": rng.choice(BEYOND).format(**values)})
    return ask(user, ONLY_WHOLE, "beyond", "whole numbers")


def compare(rng: random.Random, held: bool) -> Case:
    """Which of two numbers is larger."""
    size = rng.randint(1, 3)
    a, b = digits(rng, size), digits(rng, rng.randint(max(1, size - 1), size))
    if a == b:
        a += 1
    top, low = max(a, b), min(a, b)
    return ask(
        wording("larger", rng, held, {"a": str(a), "b": str(b)}),
        f"{top} is larger than {low}.",
        "compare",
        rf"^{top} is",
    )


def word_problem(rng: random.Random) -> Case:
    """A one-step story sum with numbers up to two digits."""
    words = load().words
    name, thing = rng.choice(words["name"]), rng.choice(words["fruit.pl"])
    a, b = rng.randint(2, 60), rng.randint(1, 39)
    forms = [
        (f"{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have?", a, "+", b),
        (f"There are {a} {thing} in a basket and {b} in a bowl. How many {thing} are there?", a, "+", b),
        (f"{name} picks {a} {thing} in the morning and {b} in the evening. How many in all?", a, "+", b),
        (f"{name} has {max(a, b)} {thing} and eats {min(a, b)}. How many {thing} are left?", max(a, b), "-", min(a, b)),
        (f"There were {max(a, b)} {thing} and {name} took {min(a, b)}. How many are left?", max(a, b), "-", min(a, b)),
        (
            f"{name} buys {max(a, b)} {thing} and gives away {min(a, b)}. How many does {name} keep?",
            max(a, b),
            "-",
            min(a, b),
        ),
    ]
    text, x, sign, y = rng.choice(forms)
    result = x + y if sign == "+" else x - y
    return ask(
        text, f"{x} {sign} {y} = {result}, so the answer is {result}.", "word_problem", rf"(?<!\d){result}(?!\d)"
    )


def counting(rng: random.Random) -> Case:
    """Counting on, down, by steps, or a plain number sequence."""
    if rng.random() < 0.4:
        start, step = rng.choice([1, 1, rng.randint(1, 30)]), rng.choice([1, 1, 1, 2, 5, 10])
        shown = rng.randint(3, 5)
        numbers = [start + step * i for i in range(shown + 6)]
        # The tenth number ends a row that starts at one, so that the usual prompt has one ending.
        stop = 10 if start == step == 1 else len(numbers)
        return plain(
            ", ".join(map(str, numbers[:shown])) + ",",
            " " + ", ".join(map(str, numbers[shown:stop])) + ".",
            "count",
            "",
        )
    low = rng.randint(1, 30)
    high = low + rng.randint(3, 9)
    if rng.random() < 0.5:
        return ask(
            rng.choice(
                [f"Count from {low} to {high}.", f"count {low} to {high}", f"List the numbers from {low} to {high}."]
            ),
            ", ".join(map(str, range(low, high + 1))),
            "count",
            "",
        )
    return ask(
        rng.choice([f"Count down from {high} to {low}.", f"Count backwards from {high} to {low}."]),
        ", ".join(map(str, range(high, low - 1, -1))),
        "count",
        "",
    )


def mathematics(rng: random.Random, held: bool = False) -> Case:
    """Any task of this module and of expressions, in the shares of the mixture."""
    from skill_expression import division, long_product, named, precedence, story_sum
    from skill_told import series, told_sum

    pick = rng.random()
    if pick < 0.28:
        return arithmetic(rng, held)
    if pick < 0.34:
        return told_sum(rng)
    if pick < 0.36:
        return series(rng)
    if pick < 0.59:
        return division(rng, held, rng.random() < 0.3)
    if pick < 0.76:
        return precedence(rng, held, rng.random() < 0.25)
    if pick < 0.84:
        return named(rng, held, rng.choice("+-**"), rng.random() < 0.3)
    if pick < 0.87:
        return long_product(rng)
    if pick < 0.89:
        return too_large(rng) if rng.random() < 0.6 else beyond(rng)
    if pick < 0.92:
        return compare(rng, held)
    if pick < 0.97:
        return word_problem(rng) if rng.random() < 0.4 else story_sum(rng)
    return counting(rng)
