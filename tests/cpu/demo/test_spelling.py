"""Copy drills: every word of one token comes in both of its forms, and the answer holds the words that were said."""

from __future__ import annotations

import json
import random
import re

from skill_spelling import spelling
from vocabulary import copied, is_held, token_words


def test_the_answer_spells_the_words_of_the_request() -> None:
    rng = random.Random(1)
    seen, forms = set(), set()
    for _ in range(1500):
        user, answer = (m["content"] for m in spelling(rng).messages)
        words = re.findall("[A-Za-z]{3,}", answer) if " " in answer or '"' in answer else []
        said = user.lower()
        assert all(w.lower() in said for w in words if w not in ("The", "words", "are")), (user, answer)
        seen |= set(words)
        forms.add(re.sub("[A-Za-z]+", "x", answer)[:6])
        if answer[0] == "{":
            # An invented word may be of the held-out part by chance; a word of a list is not.
            assert not [key for key in json.loads(answer) if is_held(key) and key in token_words(True)]
    assert len(seen) > 3000 and len(forms) > 20


def test_every_word_of_the_tokenizer_is_copied_sooner_or_later() -> None:
    rng = random.Random(2)
    drawn = {copied(rng) for _ in range(40_000)}
    words = token_words(True)
    assert len(words) > 2000 and len(drawn & set(words)) > 0.99 * len(words)
    assert not [w for w in token_words(False) if is_held(w.lower())] and set(token_words(False)) < set(words)
