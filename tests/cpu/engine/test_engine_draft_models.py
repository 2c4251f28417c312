"""Models that guess: whatever they guess, no byte changes; and what they keep of a row is always what it should be.

A model that drafts for itself is right whenever it has seen what it should have: its acceptance shows every hole.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cpu.engine.drafters import MOST, make_eagle
from tests.cpu.engine.engine_draft_models_helpers import PARAMETERS, PROMPTS, STEM, drafts, plain_outputs
from tests.cpu.engine.engine_draft_models_helpers import folders as shared_folders
from tests.cpu.engine.engines import OTHER, all_of_them, check_nothing_left, exact, greedy, hear_guesses, run
from tests.cpu.engine.engines import open_usual as open_llm

from tokenmill import SamplingParams
from tokenmill.core.drafting import AllOfThem
from tokenmill.core.errors import UserError
from tokenmill.testing.tiny import make_tiny

folders = shared_folders
ENGINES = {
    "chunks": {"max_num_batched_tokens": 16},
    "preemption": {"num_blocks": 16},
    "as short as can be": {"max_model_len": 58},
    "blocks of one token": {"block_size": 1, "num_blocks": 220},
    "other kernels": {"kernels": OTHER},
    "three plans in flight": {"depth": 3, "num_blocks": 20, "max_num_batched_tokens": 24},
    "as on a GPU": {"depth": 2},
    "another process": {"executor": "process"},
    "8 bit keys": {"kv_cache_dtype": "int8"},
}
BRIEF = {"other": ("other kernels",), "medusa": ("chunks", "as on a GPU"), "suffix": ("preemption",),
         "eagle": ("preemption", "other kernels"), "eagle3": ("chunks", "as on a GPU")}  # fmt: skip


@pytest.fixture(scope="module")
def plain(folders):
    return plain_outputs(folders["self"], PROMPTS, PARAMETERS)


@pytest.mark.parametrize("name, title", [("self", t) for t in ENGINES] + [
    (name, t) for name, titles in BRIEF.items() for t in titles
])  # fmt: skip
def test_every_engine_gives_the_same_bytes(name, title, folders, plain):
    """Prompts share a beginning and come twice, so that the second time is served by the prefix cache."""
    options = {"max_model_len": 64, "block_size": 8, **ENGINES[title]}
    same = {k: v for k, v in options.items() if k in ("max_model_len", "kernels", "kv_cache_dtype")}
    with all_of_them(open_llm(folders["self"], **drafts(folders, name), **options)) as llm:
        if "GPU" in title:
            llm.engine.executor.lazy = False  # submitting computes
        found = [run(llm, PROMPTS, PARAMETERS) for _ in range(2)]
        counters = llm.engine.scheduler.counters
        assert counters.preemptions > 0 or title != "preemption"
        assert counters.cached_tokens > 0 or "cache" in title
        if name == "self":
            assert counters.accepted > 0.6 * counters.drafted > 100  # penalties and filters are not the drafter's
        check_nothing_left(llm.engine)
    for outputs in found:
        assert [exact(o) for o in outputs] == [exact(o) for o in plain(**same)]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_a_model_that_drafts_for_itself_is_right(kernels, depth, folders):
    params = [greedy(40), SamplingParams(temperature=1.0, seed=4, max_tokens=40, ignore_eos=True)]
    prompts = [PROMPTS[3], PROMPTS[2]]
    with all_of_them(open_llm(folders["self"], **drafts(folders, "self"), kernels=kernels, depth=depth)) as llm:
        for _ in range(2):
            run(llm, prompts, params)
        counters = llm.engine.scheduler.counters
        assert counters.accepted >= 0.97 * counters.drafted
        assert counters.output_tokens / counters.steps > 1.8 * MOST
        check_nothing_left(llm.engine)


def test_an_eagle_head_that_knows_the_next_state_is_right(tmp_path):
    """The target's next token depends on its last one alone, and so does the head's state: fc takes the word's half."""
    target = make_tiny(tmp_path / "parrot", hidden=64, layers=1, architecture="llama")
    tensors = load_file(target / "model.safetensors")
    for name in tensors:
        if "o_proj" in name or "down_proj" in name:
            tensors[name] = torch.zeros_like(tensors[name])
        if name.endswith("norm.weight"):
            tensors[name] = torch.ones_like(tensors[name])
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    head = make_eagle(tmp_path / "eagle")
    tensors = load_file(head / "model.safetensors")
    for name in tensors:
        if "o_proj" in name or "down_proj" in name:
            tensors[name] = torch.zeros_like(tensors[name])
    tensors["fc.weight"] = torch.cat((torch.eye(64), torch.zeros(64, 64)), 1)
    save_file(tensors, head / "model.safetensors")
    for depth in (1, 2):
        with all_of_them(open_llm(target, **drafts({"eagle": head}, "eagle"), depth=depth)) as llm:
            run(llm, PROMPTS[:3], greedy(40))
            counters = llm.engine.scheduler.counters
            assert counters.accepted >= 0.99 * counters.drafted > 70


@pytest.mark.parametrize("name", ["eagle", "eagle3", "medusa", "other"])
def test_guesses_do_not_depend_on_the_way(name, folders):
    """What is guessed behind a text is the same however it was cut, shared, put aside and verified."""

    def guesses(**options):
        found = {}
        with all_of_them(open_llm(folders["self"], **drafts(folders, name), max_model_len=64, **options)) as llm:
            hear_guesses(llm, found)
            run(llm, PROMPTS[:4], greedy(24))
        return found

    plain, cut = guesses(), guesses(max_num_batched_tokens=16, num_blocks=24, block_size=8, depth=2)
    shared = plain.keys() & cut.keys()
    same = sum(plain[text] == cut[text] for text in shared)
    assert len(shared) > 30 and same >= 0.9 * len(shared)


TOLD = {
    "choice": {"structured_outputs": {"choice": ["mill mill mill mill", "mill mill miller", "flour and water"]}},
    "pattern": {"structured_outputs": {"regex": "([0-9]{3} [a-z]{4} ){3}done"}, "temperature": 0.9, "seed": 5},
    "with logprobs": {"structured_outputs": {"regex": "([0-9]{3} [a-z]{4} ){3}done"}, "logprobs": 2},
    "processor": {"logits_processors": [lambda said, x: x + (len(said) % 3 == 0) * 0.5 * (x == x[said[-1:] or [0]])]},
    "beams": {"use_beam_search": True, "n": 2},
}


@pytest.mark.parametrize("title, depth", [*((title, 2) for title in TOLD), ("pattern", 1)])
def test_what_the_host_has_a_say_in(title, depth, folders):
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, **TOLD[title]})
    prompts = [" mill mill mill", "flour becomes flour", "12345"]
    with open_llm(folders["self"]) as llm:
        wanted = run(llm, prompts, params)
    with all_of_them(open_llm(folders["self"], **drafts(folders, "self"), depth=depth)) as llm:
        found = [run(llm, prompts, params) for _ in range(2)]
        counters = llm.engine.scheduler.counters
        if title in ("pattern", "with logprobs", "processor"):
            assert counters.accepted > 0
        if title == "beams":
            assert counters.drafted == 0
        while llm.engine.flying:
            llm.engine.step()
        check_nothing_left(llm.engine)
    for outputs in found:
        assert [exact(o) for o in outputs] == [exact(o) for o in wanted]


def test_drafts_that_were_off_for_a_while_find_their_place_again(folders):
    """A row whose drafts stop, as at load, and begin again: what was missed is made up for."""
    with all_of_them(open_llm(folders["self"], **drafts(folders, "self"))) as llm:
        scheduler, steps = llm.engine.scheduler, []

        class OnAndOff(AllOfThem):
            def depth(self, rows):
                steps.append(rows)
                return MOST if len(steps) // 8 % 2 else 0

        scheduler.ahead.control = OnAndOff(MOST)
        run(llm, PROMPTS[:3], greedy(90))
        counters = scheduler.counters
        assert counters.accepted >= 0.95 * counters.drafted > 50
        check_nothing_left(llm.engine)


def test_usage_says_how_many_were_right(folders):
    with all_of_them(open_llm(folders["self"], **drafts(folders, "self"))) as llm:
        (out,) = run(llm, PROMPTS[:1], greedy(30))
        counters = llm.engine.scheduler.counters
        assert out.metrics is not None
        assert (out.metrics.drafted_tokens, out.metrics.accepted_tokens) == (counters.drafted, counters.accepted)


@pytest.mark.parametrize("end", ["token", "string"])
def test_drafts_behind_the_end_of_a_text_are_not_counted(end, folders):
    """A draft that the model agrees with counts if it stands in the answer."""
    with open_llm(folders["self"], depth=1) as llm:
        (out,) = run(llm, [STEM], greedy(24))
        tokens = out.outputs[0].token_ids
        place = next(n for n in range(2, 24) if tokens[n] not in tokens[:n])
        word = llm.get_tokenizer().decode([tokens[place]])
    stop = {"stop_token_ids": [tokens[place]]} if end == "token" else {"stop": word}
    with open_llm(folders["self"], depth=1, **drafts(folders, "self", num_speculative_tokens=16)) as llm:
        all_of_them(llm)
        (out,) = run(llm, [STEM], greedy(24, **stop))
        said, counters = out.outputs[0], llm.engine.scheduler.counters
    assert (said.finish_reason, said.token_ids) == ("stop", tokens[: place + 1])
    assert out.metrics.accepted_tokens == place < out.metrics.drafted_tokens
    if end == "token":  # the engine does not see stop strings
        assert counters.accepted == sum(counters.accepted_at) == place


def test_a_vocabulary_with_padding(folders, tmp_path):
    """Fewer and more ids than the target's, where the tokenizer's words are the same."""
    for size in (331, 352):
        folder = make_tiny(tmp_path / str(size), seed=size)
        config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        table = tensors["model.embed_tokens.weight"]
        tensors["model.embed_tokens.weight"] = torch.cat(
            (table, table.new_zeros(size - table.shape[0], table.shape[1]))
        )
        (folder / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    small, large = tmp_path / "331", tmp_path / "352"
    for target, draft in ((small, large), (large, small)):
        for kernels in ("reference", "auto"):
            with open_llm(target, kernels=kernels) as llm:
                wanted = run(llm, PROMPTS[:2], greedy(20))
            with all_of_them(open_llm(target, kernels=kernels, **drafts({"self": draft}, "self"))) as llm:
                found = run(llm, [[*PROMPTS[0], 330], PROMPTS[1]], greedy(20))
                assert exact(found[1]) == exact(wanted[1]) and llm.engine.scheduler.counters.drafted > 0


REFUSED = {
    "another vocabulary": ({"model": "words"}, "vocabulary|tokenizer"),
    "an unknown entry": ({"model": "other", "draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size"),
    "an unknown method": ({"method": "dflash"}, "dflash"),
    "no model": ({"method": "medusa"}, "model"),
    "too many": ({"model": "other", "num_speculative_tokens": 99}, "num_speculative_tokens"),
    "heads of another size": ({"method": "medusa", "model": "medusa"}, "hidden"),
    **{
        f"no model but heads of {m}": ({"model": m}, f'no model but heads of one: say "method": "{m}"')
        for m in ("medusa", "eagle", "eagle3")
    },
    **{
        f"a model that is said to be {m}": ({"method": m, "model": "other"}, "holds a model and no heads")
        for m in ("medusa", "eagle", "eagle3")
    },
    "a revision of a folder": ({"model": "other", "revision": "main"}, "revision chooses among .*other"),
    "a length as text": ({"method": "ngram", "prompt_lookup_max": "4"}, r"prompt_lookup_max \('4'\)"),
    "recorded beside what is not": ({"model": "other", "enforce_eager": False}, "enforce_eager"),
    "no folder": ({"model": "nowhere"}, "nowhere"),
}


@pytest.mark.parametrize("title", REFUSED)
def test_what_is_refused(title, folders, tmp_path):
    config, said = REFUSED[title]
    known = {**folders, "words": make_tiny(tmp_path / "words", vocab=300), "nowhere": tmp_path / "nowhere"}
    if "model" in config:
        config = config | {"model": str(known[config["model"]])}
    target = folders["other"] if title.startswith("heads") else folders["self"]
    with pytest.raises(UserError, match=said):
        open_llm(target, speculative_config=config, enforce_eager="recorded" in title)


@pytest.mark.parametrize("name", ["other", "medusa"])
def test_a_drafter_alone_is_not_recorded(name, folders):
    for eager in (False, True):
        config = drafts(folders, name, enforce_eager=eager)
        with all_of_them(open_llm(folders["self"], **config, kernels="auto")) as llm:
            run(llm, PROMPTS[:2], greedy(20))
            runner = llm.engine.executor.runner
            assert bool(runner.drafter.replays.made) == (runner.kernels.records and not eager)


def test_a_table_of_positions_ends_behind_the_last_guess(folders, tmp_path):
    """Guesses at the end of the longest row have places, too."""
    hf = pytest.importorskip("transformers")
    from tests.cpu.models.parity import make

    make(hf.GPT2Config(vocab_size=320, n_positions=64, n_embd=16, n_layer=1, n_head=2), tmp_path)
    options = {"speculative_config": {"model": str(tmp_path), "num_speculative_tokens": 6}}
    with pytest.raises(UserError, match=r"64 tokens is too short for the model's 61 and 6 guesses"):
        open_llm(folders["self"], max_model_len=61, **options)
    with open_llm(folders["self"], max_model_len=60, **options) as llm:
        all_of_them(llm)
        for n in (20, 21, 22):
            assert len(run(llm, [STEM * 3], greedy(n))[0].outputs[0].token_ids) == n
        assert len(run(llm, [STEM * 3], greedy(27))[0].outputs[0].token_ids) == 27
        assert llm.engine.scheduler.counters.failures == 0


def test_a_window_that_has_moved_on_is_not_followed(tmp_path):
    """Its model's places for the tokens that it has missed are gone: the row gets no drafts, a new one does."""
    folder = make_tiny(tmp_path / "m", architecture="llama")
    said = json.loads((folder / "config.json").read_text())
    said |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 12}
    (folder / "config.json").write_text(json.dumps(said))
    config = {"model": str(folder), "num_speculative_tokens": MOST}
    with open_llm(folder, enforce_eager=True) as llm:
        wanted = [exact(o) for o in run(llm, PROMPTS[:2], greedy(60))]
    with open_llm(folder, block_size=4, speculative_config=config) as llm:
        ahead, counters, steps = llm.engine.scheduler.ahead, llm.engine.scheduler.counters, iter(range(1000))
        ahead.control = AllOfThem()  # as if too much ran beside

        def timed(plan, now):
            if next(steps) == 40:
                all_of_them(llm)

        ahead.committed = timed
        found = run(llm, PROMPTS[:2], greedy(60))
        assert ahead.control.depth(1) and counters.drafted == counters.failures == 0
        late = run(llm, [[3, 4, 5]], greedy(60))
        assert counters.accepted > 20 and late[0].metrics.accepted_tokens == counters.accepted
        check_nothing_left(llm.engine)
    assert [exact(o) for o in found] == wanted
