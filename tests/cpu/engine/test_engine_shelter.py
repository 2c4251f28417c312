"""Row 11: a grammar or a detokeniser that raises ends its own request; the others' results are those of a calm run."""

from __future__ import annotations

import pytest
from tests.cpu.engine.engines import check_nothing_left, exact, greedy, run

from tokenmill.core.errors import OUR_FAULT
from tokenmill.engine.steps import deliveries
from tokenmill.text.stream_decoder import StreamDecoder

PROMPTS = [[t % 250 + 3 for t in range(s, s + n)] for s, n in ((1, 20), (50, 3), (90, 45), (130, 11))]
METHODS = ("mask", "accept", "forced", "finished", "validate")


class Raising:
    """A constraint that goes well until its `method` is called for the fourth time."""

    def __init__(self, inner, method):
        self.inner, self.method, self.calls = inner, method, 0

    def __getattr__(self, name):
        if name == self.method:
            self.calls += 1
            if self.calls > 3:
                raise RuntimeError("a panic in the grammar engine")
        return getattr(self.inner, name)

    def fork(self):
        return Raising(self.inner.fork(), self.method)


DRAFTS = {"speculative_config": {"method": "ngram"}}
CASES = [
    (method, options)
    for method in METHODS
    for options in ({}, {"depth": 2}, DRAFTS)
    if (method, options) != ("forced", {"depth": 2})  # nothing is forced into a row in flight
    and (method != "validate" or options == DRAFTS)
]


@pytest.mark.parametrize(("method", "options"), CASES)
def test_a_raising_grammar_ends_its_own_request(opened, method, options):
    llm = opened(**options)
    wanted = [exact(o) for o in run(llm, PROMPTS, greedy(20))]
    compile_spec = llm.engine.admission.compiler.constraint
    llm.engine.admission.compiler.constraint = lambda *spec: Raising(compile_spec(*spec), method)
    limits = [greedy(20)] * 4 + [greedy(40, structured_outputs={"regex": "[a-f ]{60}"})]
    *others, bad = run(llm, [*PROMPTS, [9, 8, 7]], limits)
    assert [exact(o) for o in others] == wanted
    assert bad.outputs[0].finish_reason == "error" and bad.outputs[0].stop_reason.startswith(OUR_FAULT)
    check_nothing_left(llm.engine)


def test_a_raising_detokeniser_ends_its_own_request(opened, monkeypatch):
    llm = opened()
    wanted = [exact(o) for o in run(llm, PROMPTS, greedy(20))]

    class Broken(StreamDecoder):
        def __init__(self, tokenizer, prompt_ids, *rest):
            super().__init__(tokenizer, prompt_ids, *rest)
            push, left = self.push, iter(range(4 if prompt_ids == PROMPTS[2] else 1000, -1, -1))

            def counted(tokens):
                if not next(left):
                    raise KeyError("a table without an entry")
                return push(tokens)

            self.push = counted

    monkeypatch.setattr(deliveries, "StreamDecoder", Broken)
    found = run(llm, PROMPTS, greedy(20))
    bad = found.pop(2).outputs[0]
    assert bad.finish_reason == "error" and "KeyError" in bad.stop_reason and len(bad.token_ids) == 4
    assert [exact(o) for o in found] == wanted[:2] + wanted[3:]
    check_nothing_left(llm.engine)
