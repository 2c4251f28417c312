"""What programs get wrong around an engine: names, threads, and engines that are dropped without being closed."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.cpu.engine.engines import check_nothing_left, exact, greedy, run
from tests.cpu.engine.engines import open_usual as open_llm

from tokenmill import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from tokenmill.core.errors import ParameterError, UserError
from tokenmill.engine.running.service import Service


@pytest.mark.parametrize(
    ("given", "words"),
    [({"max_token": 5}, "max_tokens"), ({"temprature": 0}, "temperature"), ({"swap": 1}, "no field 'swap'. Leave it")],
)
def test_a_field_that_is_not_there_is_named_with_its_neighbour(given, words):
    with pytest.raises(ParameterError, match=words):
        SamplingParams(**given)


def test_parameters_are_given_by_name_and_copied():
    with pytest.raises(ParameterError, match="by name"):
        SamplingParams(0.5)
    params = SamplingParams(stop=["a"], seed=3)
    copy = params.clone()
    assert copy == params and copy.stop is not params.stop


def test_fields_that_were_set_later_are_checked_before_any_work(tiny):
    params = SamplingParams()
    params.temperature = -5.0
    with open_llm(tiny) as llm:
        with pytest.raises(ParameterError, match="temperature"):
            llm.generate(["fine", "x"], [SamplingParams(), params], use_tqdm=False)
        check_nothing_left(llm.engine)


def test_misspelt_options_of_chat_and_tools_of_no_use(tiny):
    said = [{"role": "user", "content": "x"}]
    with open_llm(tiny) as llm:
        for given, words in (
            ({"add_generation_promptt": True}, "Did you mean 'add_generation_prompt'"),
            ({"tool": []}, "Did you mean 'tools'"),
            ({"lora_request": 1}, "must be a LoRARequest"),
            ({"tools": "weather"}, "list of dicts"),
            ({"tools": ["weather"]}, "list of dicts"),
        ):
            with pytest.raises(ParameterError, match=words):
                llm.chat(said, greedy(1), **given)
        for lost in ({"mood": "merry"}, {"chat_template_kwargs": {"mood": 1}},
                     {"documents": [{"text": "x"}]}):  # fmt: skip
            with pytest.raises(ParameterError, match="would be lost: the chat template never reads it"):
                llm.chat(said, greedy(1), **lost)
        moody = "{{ mood }}{% for m in messages %}{{ m.content }}{% endfor %}"
        assert llm.chat(said, greedy(2), mood="merry", chat_template=moody)[0].prompt == "merryx"
        picture = {"type": "image_url", "image_url": {"url": "data:,"}}
        with pytest.raises(ParameterError, match="image_url"):
            llm.chat([{"role": "user", "content": [{"type": "text", "text": "What is this?"}, picture]}], greedy(1))


def test_a_model_is_named_by_text(tiny):
    with pytest.raises(ParameterError, match="model must be text"):
        LLM(None)
    with pytest.raises(ParameterError, match="quantization must be text"):
        open_llm(tiny, quantization=8)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"quantization": "nope"}, "quantised at load to fp8, int8"),
        ({"speculative_config": {"method": "nope"}}, "method 'nope' is not available"),
        ({"lora_modules": ["a=/b"]}, "needs enable_lora"),
        ({"served_model_name": ""}, "a name is empty"),
        ({"generation_config": "/nowhere"}, "no generation_config.json"),
    ],
    ids=str,
)
def test_options_are_looked_at_before_the_model(option, words):
    with pytest.raises(ParameterError, match=words):
        LLM("/nowhere/at/all", **option)


def test_threads_take_turns(tiny):
    prompts = [[5, 6, 7, i] for i in range(6)]
    found: dict[int, object] = {}
    with open_llm(tiny) as llm:
        wanted = [exact(o) for o in run(llm, prompts, greedy(12))]

        def ask(i: int) -> None:
            found[i] = exact(run(llm, [prompts[i]], greedy(12))[0])

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[i] for i in range(6)] == wanted
        check_nothing_left(llm.engine)


def test_a_processor_cannot_ask_its_own_engine(tiny):
    with open_llm(tiny) as llm:
        asked: list[str] = []

        def nested(said, logits):
            try:
                run(llm, [[1]], greedy(1))
            except UserError as error:
                asked.append(str(error))
            return logits

        (output,) = run(llm, [[5, 6]], greedy(2, logits_processors=[nested]))
        assert len(asked) == 2 and "answering already" in asked[0]
        assert len(output.outputs[0].token_ids) == 2
        check_nothing_left(llm.engine)


def test_a_closed_engine_says_so(tiny):
    llm = open_llm(tiny)
    run(llm, [[5, 6]], greedy(1))
    for _ in range(2):
        llm.close()
        for call in (
            lambda: llm.generate("x", use_tqdm=False),
            lambda: llm.chat([{"role": "user", "content": "x"}], use_tqdm=False),
            lambda: llm.embed("x", use_tqdm=False),
        ):
            with pytest.raises(UserError, match="This LLM is closed"):
                call()


SCRIPT = """
from tokenmill import {kind}
OPTIONS = dict(max_model_len=64, kv_cache_memory_bytes=1 << 20, executor={executor!r})
"""


def end_of(tmp_path: Path, kind: str, executor: str, *lines: str) -> tuple[int, str]:
    """Exit status and standard error of a script that makes an engine at its top."""
    file = tmp_path / "script.py"
    file.write_text(SCRIPT.format(kind=kind, executor=executor) + "\n".join(lines) + "\n")
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stderr


def test_a_script_needs_no_guard(tiny, tmp_path):
    """The main script is not run again by the process that computes."""
    lines = f"print(len(LLM({str(tiny)!r}, **OPTIONS).generate('x', use_tqdm=False)))", "print('once')"
    assert end_of(tmp_path, "LLM", "process", *lines) == (0, "")


@pytest.mark.parametrize("kind", ["LLM", "AsyncLLM"])
def test_a_script_that_leaves_its_engine_open_ends_quietly(kind, tiny, tmp_path):
    ask = {
        "LLM": ["llm.generate('x', SamplingParams(max_tokens=2), use_tqdm=False)"],
        "AsyncLLM": [
            "import asyncio",
            "async def ask():",
            "    async for output in llm.generate('x', SamplingParams(max_tokens=2)):",
            "        pass",
            "asyncio.run(ask())",
        ],
    }[kind]
    made = f"llm = {kind}({str(tiny)!r}, **OPTIONS)"
    assert end_of(tmp_path, kind, "inprocess", "from tokenmill import SamplingParams", made, *ask) == (0, "")


async def test_an_engine_that_is_dropped_ends_its_thread(tiny):
    options = {"kernels": "reference", "max_model_len": 64, "kv_cache_memory_bytes": 1 << 20}
    llm = AsyncLLM(str(tiny), **options)
    async for _ in llm.generate([5, 6], greedy(2)):
        pass
    thread = llm.service.thread
    assert isinstance(llm.service, Service) and thread.is_alive()
    del llm, _
    gc.collect()
    thread.join(120)
    assert not thread.is_alive()
    async with AsyncLLM(str(tiny), **options) as llm:
        thread = llm.service.thread
    assert not thread.is_alive()


def _endless() -> dict:
    kept = {}
    kept["self"] = kept
    return {"role": "user", "content": "a", "annotations": kept}


WRONG_KINDS = {
    "priority": (lambda llm: llm.generate("x", priority=5), "priority"),
    "a priority as text": (lambda llm: llm.generate("x", priority=["high"]), "priority must be an integer"),
    "no priority": (lambda llm: llm.generate("x", priority=[None]), "priority must be an integer"),
    "half a priority": (lambda llm: llm.llm_engine.add_request("a", "x", priority=float("nan")), "priority must be"),
    "a request id": (lambda llm: llm.llm_engine.add_request(["a"], "x"), "request_id must be text"),
    "a conversation without end": (lambda llm: llm.chat([_endless()]), "nested without end"),
    "labels as a number": (lambda llm: llm.classify("x", labels=5), "labels"),
    "labels without order": (lambda llm: llm.classify("x", labels={"a", "b"}), "labels"),
    "beam_width": (lambda llm: llm.beam_search("x", BeamSearchParams(beam_width=None, max_tokens=1)), "beam_width"),
    "beam_width (none)": (lambda llm: llm.beam_search("x", BeamSearchParams(beam_width=0, max_tokens=1)), "beam_width"),
    "weights as a number": (lambda llm: llm.update_weights(5), "pairs of a name and a tensor"),
    "no weights": (lambda llm: llm.update_weights(None), "pairs of a name and a tensor"),
    "a level that only equals one": (lambda llm: llm.sleep(1.0), "level"),
    "tags as a number": (lambda llm: llm.wake_up(tags=5), "tags"),
}


def test_values_of_another_kind_are_told_by_their_names(tiny):
    with open_llm(tiny, enable_sleep_mode=True, scheduling_policy="priority") as llm:
        before = run(llm, ["x"], greedy(3))[0].outputs[0].token_ids
        llm.sleep(1)
        with pytest.raises(UserError, match="tags"):
            llm.wake_up(tags=5)
        llm.wake_up()
        for call, words in WRONG_KINDS.values():
            with pytest.raises(UserError, match=words):
                call(llm)
        assert run(llm, ["x"], greedy(3))[0].outputs[0].token_ids == before
        check_nothing_left(llm.engine)


AFTER_THE_END = {
    "generate": ("x",), "chat": ([{"role": "user", "content": "x"}],), "embed": ("x",), "encode": ("x",),
    "score": ("x", "y"), "sleep": (), "wake_up": (), "update_weights": ({},), "start_weight_update": (),
    "finish_weight_update": (), "get_metrics": (), "reset_prefix_cache": (), "start_profile": (),
    "collective_rpc": (print,), "apply_model": (print,),
}  # fmt: skip


def test_nothing_works_after_the_end(tiny):
    llm = open_llm(tiny)
    llm.close()
    llm.close()
    for name, given in AFTER_THE_END.items():
        with pytest.raises(UserError, match="closed"):
            getattr(llm, name)(*given)
    with pytest.raises(UserError, match="closed"):
        _ = llm.llm_engine


def test_a_recording_that_nobody_ends_does_not_crash_the_process():
    program = (
        "from tokenmill.engine.interfaces.profiling import Profiler\nkept = Profiler()\nkept.start()\nprint('done')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
