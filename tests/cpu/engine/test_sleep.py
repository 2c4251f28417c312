"""Sleep and wake: memory goes and comes back at the same addresses, and answers are those of before, bit for bit."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from tests.cpu.engine.drafters import make_eagle, make_medusa
from tests.cpu.engine.engine_families_helpers import ALL, Family
from tests.cpu.engine.engines import BACKENDS, exact, greedy, open_llm, run
from tests.cpu.models.family_cases import ALL as LATER

from tokenmill import AsyncLLM, SamplingParams
from tokenmill.core.errors import BusyError, UserError
from tokenmill.device import host_pages
from tokenmill.engine.interfaces.prompts import make_request
from tokenmill.engine.load.inplace import weights_of
from tokenmill.program import Session
from tokenmill.testing.tiny import make_tiny

FULL = os.environ.get("TOKENMILL_RELIABILITY") == "1"
PROMPTS = [[1, 2, 3], [4, 5] * 12]
KINDS = [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}, {"quantization": "fp8"}]
OLDER = ("mistral-window", "qwen3-moe", "gemma3", "gpt2", "deepseek-v2", "qwen3-next", "falcon-7b")
FAMILIES = {name: ALL[name] for name in OLDER} | {name: LATER[f"{name}-0"] for name in ("gemma3n", "gemma4")}


@pytest.fixture(autouse=True)
def small_tensors_count(monkeypatch):
    """The tensors of tiny models lie on few pages; these go all the same."""
    monkeypatch.setattr(host_pages, "LEAST_BYTES", 4096)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("sleeper"), hidden=64, heads=4, kv_heads=2)


def sleeping(folder, **options):
    return open_llm(folder, enable_sleep_mode=True, **options)


def said(llm, count=10):
    return [exact(output) for output in run(llm, PROMPTS, greedy(count, logprobs=2))]


def addresses(llm):
    runner = llm.engine.executor.runner
    return [t.data_ptr() for t in (*weights_of(runner.model), *runner.pool.storage)]


def tapes(llm):
    return [id(recorder) for recorder in llm.engine.executor.runner.recorders]


@pytest.mark.parametrize(
    ("backend", "options"),
    [(BACKENDS[-1], kind) for kind in KINDS] + [(BACKENDS[0], kind) for kind in (KINDS if FULL else KINDS[:1])],
    ids=lambda each: each if isinstance(each, str) else "-".join(each.values()) or "float32",
)
def test_answers_addresses_and_recordings_stay(folder, backend, options):
    with sleeping(folder, kernels=backend, **options) as llm:
        before, places, recorded = said(llm), addresses(llm), tapes(llm)
        for level in (1, 1, 2, 1, 2):
            llm.sleep(level)
            assert llm.is_sleeping
            big = [t for t in weights_of(llm.engine.executor.runner.model) if t.untyped_storage().nbytes() > 3 * 4096]
            assert big and all(_is_gone(t) for t in big), "the weights' pages are gone"
            with pytest.raises(BusyError, match="sleeps"):
                run(llm, PROMPTS, greedy(1))
            llm.wake_up()
            assert not llm.is_sleeping and addresses(llm) == places and tapes(llm) == recorded
            assert said(llm) == before


def _is_gone(tensor):
    """Zeros within, or a page of a file that nobody has touched: looked at through the map of pages."""
    page = os.sysconf("SC_PAGE_SIZE")
    storage = tensor.untyped_storage()
    start, stop = -(-storage.data_ptr() // page), (storage.data_ptr() + storage.nbytes()) // page
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(start * 8)
        entries = file.read((stop - start) * 8)
    return not any(entries[i * 8 + 7] >> 7 for i in range(stop - start))


def test_maps_of_files_are_let_go_and_what_was_written_to_them_is_kept(tmp_path):
    import mmap

    page = os.sysconf("SC_PAGE_SIZE")
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * (page // 16))
    with path.open("rb") as file:
        tensor = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    tensor[3 * page : 5 * page] = 7
    values = tensor.clone()
    pages = host_pages.HostPages([tensor])
    assert sum(stop - start for start, stop in pages.kept) == 2 * page and pages.size_bytes == tensor.nbytes
    pages.save(str(tmp_path))
    pages.drop()
    assert _is_gone(tensor) and not torch.equal(tensor, values)
    pages.restore()
    assert torch.equal(tensor, values)
    pages.save()
    assert not list(tmp_path.glob("tokenmill-*")), "the file has no name"


def test_with_all_that_a_request_may_ask_for(folder):
    """Grammars, several outputs, beams, penalties, narrow K/V, chunks, few blocks."""
    params = [
        greedy(12, logprobs=2, prompt_logprobs=1), greedy(12, repetition_penalty=1.2),
        SamplingParams(temperature=0.9, seed=4, n=3, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0.7, seed=5, max_tokens=30, structured_outputs={"choice": ["yes", "no, never"]}),
        SamplingParams(temperature=0, use_beam_search=True, n=2, max_tokens=6),
    ]  # fmt: skip
    prompts = [[7, 8, 9, 10] * 6, [7, 8, 9, 10] * 6 + [3], [1, 2], [9, 5], [4] * 9]
    options = {"kv_cache_dtype": "int8", "num_blocks": 14, "long_prefill_token_threshold": 7, "max_model_len": 160}
    with sleeping(folder, kernels=BACKENDS[-1], quantization="int8", **options) as llm:
        before = [exact(each) for each in run(llm, prompts, params)]
        for level in (1, 2):
            llm.sleep(level)
            assert llm.engine.scheduler.tables.pools[0].held == 0
            llm.wake_up()
            assert [exact(each) for each in run(llm, prompts, params)] == before


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_layer_wakes(family, tmp_path):
    made = Family(FAMILIES[family], tmp_path, 6)
    with made.open(enable_sleep_mode=True, kernels=BACKENDS[-1]) as llm:
        before = [exact(each) for each in run(llm, made.prompts, made.params)]
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert [exact(each) for each in run(llm, made.prompts, made.params)] == before


@pytest.mark.parametrize("kind", ["self", "eagle3", "medusa"])
def test_drafters_sleep_with_their_model(kind, tmp_path):
    target = make_tiny(tmp_path / "target")
    made = {"self": lambda: target, "eagle3": lambda: make_eagle(tmp_path / "e", words=100),
            "medusa": lambda: make_medusa(tmp_path / "m")}[kind]()  # fmt: skip
    config = {"model": str(made), "num_speculative_tokens": 3, **({} if kind == "self" else {"method": kind})}
    with sleeping(target, speculative_config=config, kernels=BACKENDS[-1]) as llm:
        before = said(llm)
        accepted = llm.engine.scheduler.counters.accepted
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert said(llm) == before
            again = llm.engine.scheduler.counters.accepted
            assert kind != "self" or again > accepted > 0, "it guesses as it did"
            accepted = again


def test_tags_updates_and_levels(folder, tmp_path):
    """Rollouts: weights wake, take new numbers, then the cache wakes. Level 2 forgets such numbers, 1 does not."""
    other = make_tiny(tmp_path / "other", seed=5, hidden=64, heads=4, kv_heads=2)
    with open_llm(other) as fresh:
        wanted = said(fresh)
    with sleeping(folder, kernels=BACKENDS[-1]) as llm, pytest.MonkeyPatch.context() as patch:
        before = said(llm)
        for level in (2, 1):
            llm.sleep(level)
            with pytest.raises(UserError, match=r"wake_up\(tags="):
                llm.update_weights(other / "model.safetensors")
            llm.wake_up(tags=["weights"])
            assert llm.is_sleeping
            llm.update_weights(load_file(other / "model.safetensors"))
            with pytest.raises(BusyError):
                run(llm, PROMPTS, greedy(1))
            llm.wake_up(tags=["kv_cache"])
            if BACKENDS[-1] == "reference":
                assert said(llm) == wanted
            now = said(llm)
            assert now != before
            llm.sleep(1)
            llm.wake_up()
            assert said(llm) == now
            llm.sleep(1)
            llm.sleep(2)
            llm.wake_up()
            assert said(llm) == before
        patch.setattr(host_pages.HostPages, "_move", full_disk)
        with pytest.raises(UserError, match=r"^/\S+: the weights cannot be kept there .*No space left.*--sleep-folder"):
            llm.sleep(1)
        assert not llm.is_sleeping and said(llm) == before, "nothing has been given back"


def full_disk(self, file, move):
    raise OSError(28, "No space left on device")


def test_bad_calls_are_told(folder, tmp_path):
    with open_llm(folder) as awake:
        with pytest.raises(UserError, match="enable_sleep_mode=True"):
            awake.sleep()
        assert awake.wake_up() is None and not awake.is_sleeping
    with sleeping(folder, sleep_folder=str(tmp_path / "absent")) as llm:
        for call, words in (
            (lambda: llm.sleep(3), "level must be 1"), (lambda: llm.sleep(True), "level"),
            (lambda: llm.wake_up(["weight"]), "tags must be among weights, kv_cache"),
            (lambda: llm.sleep(mode="keep"), "mode must be wait or abort.*not frozen"),
            (llm.sleep, "No such file"),
        ):  # fmt: skip
            with pytest.raises(UserError, match=words):
                call()
            assert not llm.is_sleeping
        llm.wake_up()
    with sleeping(folder) as llm:
        llm.llm_engine.add_request("open", [1, 2, 3], greedy(40))
        llm.sleep(2)  # it has ended first
        llm.wake_up("weights")
        llm.wake_up(["kv_cache"])
        engine, session = llm.llm_engine, Session(llm)
        (output,) = engine.step()
        assert output.finished and output.outputs[0].finish_reason == "length"
        engine.add_request("open", [1, 2, 3], greedy(40))
        talk = session.talk("a").gen(max_tokens=40, ignore_eos=True)
        llm.sleep(2, mode="abort")
        assert not llm.engine.has_work
        assert talk["answer"] == "", "who waits for it hears that it has ended"
        (output,) = engine.step()
        assert output.finished and output.outputs[0].finish_reason == "abort"
        assert not engine.has_unfinished_requests()


@pytest.mark.skipif(not FULL, reason="TOKENMILL_RELIABILITY=1 runs it; test_engine_ranks.py has two ranks asleep")
def test_several_ranks_and_engines_sleep_together(folder):
    spreads = ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size")
    for spread in ({"executor": "process"}, *({name: 2} for name in spreads)):
        with sleeping(folder, **spread) as llm:
            before = said(llm)
            for level in (1, 2):
                llm.sleep(level)
                with pytest.raises(BusyError):
                    run(llm, PROMPTS, greedy(1))
                llm.wake_up()
                assert said(llm) == before


async def test_streams_end_before_it_sleeps(folder):
    options = {"dtype": "float32", "kernels": "reference", "max_model_len": 256, "kv_cache_memory_bytes": 1 << 22}
    async with AsyncLLM(str(folder), enable_sleep_mode=True, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)

        async def ask(name):
            async for output in llm.generate({"prompt_token_ids": [1, 2, 3]}, params, name):
                if len(output.outputs[0].token_ids) == 3:
                    begun.set()
            return output.outputs[0]

        begun = asyncio.Event()
        first = asyncio.ensure_future(ask("a"))
        await begun.wait()
        going = asyncio.ensure_future(llm.sleep(1))
        await asyncio.sleep(0)
        with pytest.raises(BusyError):
            await ask("b")
        await going
        whole = await first
        assert len(whole.token_ids) == 60 and await llm.is_sleeping()
        await llm.wake_up(["weights"])
        assert await llm.is_sleeping()
        await llm.wake_up()
        assert (await ask("c")).token_ids == whole.token_ids and not await llm.is_sleeping()
        begun.clear()
        second = asyncio.ensure_future(ask("d"))
        await begun.wait()
        await llm.sleep(2, mode="abort")
        assert (await second).finish_reason == "abort"
        await llm.wake_up()
        assert (await ask("e")).token_ids == whole.token_ids


MEASURE = """
import sys
from tokenmill import LLM, SamplingParams
def rss():
    return int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0]) << 10
if __name__ == "__main__":
    llm = LLM(sys.argv[1], enable_sleep_mode=True, kv_cache_memory_bytes=64 << 20, max_model_len=512, dtype="float32",
              quantization=sys.argv[2] if len(sys.argv) > 2 else None)
    ask = lambda: llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(temperature=0, max_tokens=8),
                               use_tqdm=False)[0].outputs[0].token_ids
    first, awake, found = ask(), rss(), []
    for level in (1, 1, 2):
        llm.sleep(level)
        found.append(awake - rss())
        llm.wake_up()
        assert ask() == first
    held = llm.built.facts.weight_bytes
    print(held, *found)
"""


@pytest.mark.parametrize("quantization", [(), ("int4",)] if FULL else [()], ids=lambda q: "".join(q) or "float32")
def test_memory_goes_down_by_the_weights(quantization, tmp_path):
    """In a process of its own: nothing else comes and goes there."""
    folder = make_tiny(tmp_path / "wide", hidden=512, heads=8, kv_heads=8, layers=4, vocab=8000)
    program = tmp_path / "measure.py"
    program.write_text(MEASURE)
    command = [sys.executable, str(program), str(folder), *quantization]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    weights, *freed = map(int, done.stdout.split()[-4:])
    assert weights > (2 if quantization else 8) << 20
    assert all(each > 0.9 * weights for each in freed), (weights, freed)


def test_what_an_engine_that_died_had_accepted_is_not_refused(tiny):
    """However many requests wait."""
    with open_llm(tiny, max_num_seqs=1, max_waiting=1) as llm:
        for name in "ab":
            request = make_request(name, None, [5, 6], greedy(2))
            request.again = name == "b"
            llm.engine.add(request)
        with pytest.raises(BusyError, match="2 requests are open"):
            llm.engine.add(make_request("c", None, [5, 6], greedy(2)))


def test_sleep_waits_for_requests_that_wait_for_a_grammar(tiny):
    """They are open, though no engine has them yet; new ones are refused."""

    async def check() -> None:
        async def ask(name: str, params: SamplingParams) -> str:
            outputs = [one async for one in llm.generate({"prompt_token_ids": [5, 6]}, params, name)]
            return outputs[-1].outputs[0].finish_reason

        properties = {f"k{i}": {"type": "string", "pattern": "[a-z]{1,9}(x|y){3,9}"} for i in range(9)}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        params = SamplingParams(temperature=0, max_tokens=5, structured_outputs={"json": schema})
        async with AsyncLLM(str(tiny), enable_sleep_mode=True, kv_cache_memory_bytes=1 << 22, max_model_len=64) as llm:
            task = asyncio.ensure_future(ask("slow", params))
            while not llm.service.callers:
                await asyncio.sleep(0)
            sleep = asyncio.ensure_future(llm.sleep(1))
            await asyncio.sleep(0)
            with pytest.raises(BusyError, match="sleeps"):
                await ask("late", greedy(2))
            await sleep
            assert await task == "length" and await llm.is_sleeping()

    asyncio.run(check())
