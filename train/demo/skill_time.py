"""Time reckoned on or back. Owns: days, dates, hours, units and ages, and their sums. Knows no tokens."""

from __future__ import annotations

import random

from authored_data import load
from render import Case
from skill_everyday import DAYS
from skill_expression import Node, ends_with, value, worked
from skill_facts import ask
from vocabulary import word

VEHICLES = ["bus", "train", "tram", "ship", "ferry", "boat", "lift", "plane", "cable", "car", "coach"]


def _days_on(rng: random.Random) -> tuple[str, str, str]:
    at, n = rng.randrange(7), rng.randint(2, 10)
    forms = [
        "If today is {x}, what day is it in {n} days?",
        "Today is {x}. Which day is it in {n} days?",
        "It is {x}. What day comes {n} days later?",
    ]
    forms += [
        "What day is {n} days after {x}?",
        "{n} days after {x} is which day?",
        "{x} plus {n} days?",
        "On {x} I say: see you in {n} days. Which day is that?",
    ]
    there, text = DAYS[(at + n) % 7], rng.choice(forms)
    if rng.random() < 0.25:
        there = DAYS[(at - n) % 7]
        text = rng.choice(
            [
                "If today is {x}, what day was it {n} days ago?",
                "What day is {n} days before {x}?",
                "Today is {x}. Which day was {n} days ago?",
            ]
        )
        return text.replace("{x}", DAYS[at]).replace("{n}", str(n)), f"{n} days before {DAYS[at]} is {there}.", there
    return text.replace("{x}", DAYS[at]).replace("{n}", str(n)), f"{n} days after {DAYS[at]} is {there}.", there


def _dates(rng: random.Random) -> tuple[str, str, str]:
    month, a = rng.choice(load().words["month"]), rng.randint(1, 18)
    n = rng.randint(2, 28 - a)
    first, last = (f"{a} {month}", f"{a + n} {month}") if rng.random() < 0.6 else (f"{month} {a}", f"{month} {a + n}")
    if rng.random() < 0.5:
        forms = [
            "How many days are there from {f} to {l}?",
            "How many days between {f} and {l}?",
            "Days from {f} to {l}?",
            "It is {f}. How many days until {l}?",
        ]
        return (
            rng.choice(forms).replace("{f}", first).replace("{l}", last),
            f"{a + n} - {a} = {n}, so it is {n} days.",
            f" {n} days",
        )
    forms = [
        "What date is {n} days after {f}?",
        "Today is {f}. Which date is it in {n} days?",
        "{f} plus {n} days?",
        "On {f} I leave for {n} days. When am I back?",
    ]
    return (
        rng.choice(forms).replace("{f}", first).replace("{n}", str(n)),
        f"{a} + {n} = {a + n}, so it is {last}.",
        last,
    )


def _hours(rng: random.Random) -> tuple[str, str, str]:
    a = rng.randint(5, 18)
    n = rng.randint(1, 23 - a)
    minute = rng.choice(["00", "00", "30", "15"])
    first, last = f"{a}:{minute}", f"{a + n}:{minute}"
    if rng.random() < 0.5:
        forms = [
            "A [v] leaves at {f} and takes {n} hours. When does it arrive?",
            "It is {f}. What time is it in {n} hours?",
            "A film starts at {f} and lasts {n} hours. When does it end?",
        ]
        forms += [
            "I work {n} hours from {f} on. When am I done?",
            "What is {n} hours after {f}?",
            "The party begins at {f} and is {n} hours long. When is it over?",
        ]
        text = rng.choice(forms).replace("[v]", rng.choice(VEHICLES)).replace("{f}", first).replace("{n}", str(n))
        return text, f"{a} + {n} = {a + n}, so it is {last}.", last
    forms = [
        "The [s] is open from {f} to {l}. How many hours?",
        "How many hours are there from {f} to {l}?",
        "I slept from {f} until {l}. How long was that?",
        "How long is it from {f} to {l}?",
    ]
    first, last = (str(a), str(a + n)) if rng.random() < 0.5 else (first, last)
    text = rng.choice(forms).replace("[s]", word(rng, "noun", False)).replace("{f}", first).replace("{l}", last)
    return text, f"{a + n} - {a} = {n}, so it is {n} hours.", f" {n} hours"


UNITS = [
    ("minutes", "hours", 60),
    ("seconds", "minutes", 60),
    ("hours", "days", 24),
    ("days", "weeks", 7),
    ("months", "years", 12),
]
UNITS += [
    ("cents", "euros", 100),
    ("metres", "kilometres", 1000),
    ("grams", "kilos", 1000),
    ("centimetres", "metres", 100),
]


def _units(rng: random.Random) -> tuple[str, str, str]:
    small, large, rate = rng.choice(UNITS)
    n = rng.randint(2, 5 if rate == 24 else 9)
    forms = [
        "How many {s} are in {n} {l}?",
        "{n} {l} are how many {s}?",
        "How many {s} do {n} {l} have?",
        "What is {n} {l} in {s}?",
        "{n} {l} in {s}?",
    ]
    text = rng.choice(forms).replace("{s}", small).replace("{l}", large).replace("{n}", str(n))
    return text, f"{n} * {rate} = {n * rate}, so it is {n * rate} {small}.", f" {n * rate} "


def _ages(rng: random.Random) -> tuple[str, str, str]:
    a, n = rng.randint(4, 60), rng.randint(2, 30)
    who = rng.choice(["I", rng.choice(load().words["name"]), f"My {word(rng, 'noun', False)}"])
    be, will = ("am", "will I be") if who == "I" else ("is", f"will {'it' if who.startswith('My') else who} be")
    pick = rng.random()
    if pick < 0.4:
        forms = [
            f"{who} {be} {a}. How old {will} in {n} years?",
            f"{who} {be} {a} years old. What age {will} in {n} years?",
            f"In {n} years, how old {will}? {who} {be} {a} now.",
        ]
        return rng.choice(forms), f"{a} + {n} = {a + n}.", ends_with(a + n)
    if pick < 0.7:
        one, two = rng.sample(load().words["name"], 2)
        older = rng.random() < 0.6
        n = n if older else rng.randint(1, a - 1)
        forms = [
            "{x} is {a} and {y} is {n} years {o}. How old is {y}?",
            "{y} is {n} years {o} than {x}, who is {a}. How old is {y}?",
            "{x} is {a}. {y} is {n} years {o}. What is the age of {y}?",
        ]
        text = rng.choice(forms).format(x=one, y=two, a=a, n=n, o="older" if older else "younger")
        node: Node = ("+" if older else "-", a, n)
        return text, worked(node) + ".", ends_with(value(node))
    year = rng.randint(1930, 2015)
    forms = [
        f"I was born in {year}. How old was I in {year + n}?",
        f"A house from {year}: how old was it in {year + n}?",
        f"How many years from {year} to {year + n}?",
    ]
    return rng.choice(forms), f"{year + n} - {year} = {n}.", ends_with(n)


def time_sum(rng: random.Random) -> Case:
    """Days, dates, hours, units and ages, reckoned on or back."""
    text, answer, must = rng.choice([_days_on, _dates, _hours, _units, _ages])(rng)
    return ask(text, answer, "time_sum", must)
