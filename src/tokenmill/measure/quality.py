"""How closely a model follows another one. Owns: perplexity, divergence and agreement on a text, tasks, sizes.

    KL         the mean over positions of sum p log(p / q): p the base's next-token probabilities, q the model's
    agreement  how often the likeliest next token is the base's
Both models read the same tokens in the same windows. Must not know: terminals, formats of weights.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenmill.core.config import CacheOptions
from tokenmill.core.errors import ParameterError, UserError, shown
from tokenmill.core.request import SamplingParams
from tokenmill.core.text_file import lines_of, read_text_file
from tokenmill.engine.load.loading import compute_dtype
from tokenmill.engine.load.memory import kv_format
from tokenmill.engine.load.model_source import ModelSource, find_source
from tokenmill.kernels import make_kernels
from tokenmill.models.registry import build_model, context_of
from tokenmill.quantize.calibration_text import check_ids, lead_and_rest
from tokenmill.quantize.forward import EXACT, forward_in_parts, logits

WINDOW = 256
MOST_TOKENS = 1 << 15
MOST_TASKS = 10_000
MOST_TASK_CHARS = 16 << 20
_PIECE = 512
_MORE = 4
"""So many more tokens than the answer has may be said: a model may spell it in another way."""


@dataclass(frozen=True, slots=True)
class Quality:
    """One model's figures. Those relative to the base are None for the base itself."""

    model: str
    weight_bytes: int
    perplexity: float
    kl: float | None
    agreement: float | None
    tasks: float | None
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class QualityTask:
    """A question with `choices`, one of which is right, or with an answer with which the text must begin."""

    prompt: str
    choices: tuple[str, ...]
    answer: int
    text: str = ""


@dataclass(slots=True)
class _Read:
    """A model that has read the windows: its hidden states [N, L, hidden], and the function that turns them into
    logits."""

    model: Any
    kernels: Any
    hidden: Tensor
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Questions:
    """What each model is asked: a text, tasks or None, and whether it is timed. cache: how all models except the base
    store their K/V."""

    text: str
    tasks: list[QualityTask] | None = None
    speed: bool = True
    device: str = "cpu"
    cache: CacheOptions | None = None


def compare(base: str, models: list[str], asked: Questions) -> list[Quality]:
    """The base's figures, then those of the others."""
    source, others = find_source(base), [find_source(name) for name in models]
    reach = min(context_of(each.config()) for each in (source, *others))
    for each in (source, *others):
        _check_tasks(each, asked.tasks or [], reach)
    windows, first = _windows(source, asked.text, reach)
    read = _read(source, windows, asked.device, None)
    found = [_figures(base, read, None, windows[:, first:], replace(asked, cache=None))]
    for name, other in zip(models, others, strict=True):
        if not torch.equal(_windows(other, asked.text, reach)[0], windows):
            raise UserError(f"{name} cuts the text into other tokens than {base}: the two cannot be compared.")
        copy = _read(other, windows, asked.device, asked.cache)
        if copy.model.spec.vocab_size != read.model.spec.vocab_size:
            raise UserError(
                f"{name} tells {copy.model.spec.vocab_size} tokens apart and {base} {read.model.spec.vocab_size}: the "
                "two cannot be compared."
            )
        found.append(_figures(name, copy, read, windows[:, first:], asked))
    return found


def _windows(source: ModelSource, text: str, reach: int) -> tuple[Tensor, int]:
    """Windows [N, L], each of which begins with what every text of this model begins with, and the place of the first
    token that is judged. reach: of the shortest context."""
    lead, ids = lead_and_rest(text, source.tokenizer().encode)
    ids = ids[:MOST_TOKENS]
    if len(ids) < 16:
        raise UserError(f"The text has {len(ids)} tokens; at least 16 are needed.")
    count = -(-len(ids) // max(min(WINDOW, reach) - len(lead), 1))  # windows of equal length leave hardly any token out
    width = len(ids) // count
    cuts = [lead + ids[at : at + width] for at in range(0, count * width, width)]
    return torch.tensor(cuts), max(len(lead), 1)


def _read(source: ModelSource, windows: Tensor, device: str, cache: CacheOptions | None) -> _Read:
    config, kernels = source.config(), make_kernels(device)
    dtype = compute_dtype("auto", config, device, [])
    stored = EXACT if cache is None else kv_format(cache, dtype)
    checkpoint = source.checkpoint("auto", seed=0, device=device)
    try:
        model = build_model(
            config,
            checkpoint,
            dtype=dtype,
            device=device,
            kernels=kernels,
            max_positions=max(16, windows.shape[1]),
        )
    finally:
        checkpoint.close()
    check_ids(int(windows.max()), model.spec.vocab_size, str(source.path))
    hidden = forward_in_parts(model, windows, kernels, torch.device(device), stored)
    if not bool(torch.isfinite(hidden).all()):
        raise UserError(f"{source.path} computes infinite numbers or NaN on the text: its weights are damaged.")
    return _Read(model, kernels, hidden, int(model.spec.extras.get("weight_bytes", 0)))  # type: ignore[call-overload]


def _figures(name: str, read: _Read, base: _Read | None, judged: Tensor, asked: Questions) -> Quality:
    """judged: the last tokens [N, n] of each window."""
    device = torch.device(asked.device)
    targets = judged.flatten()
    lost = divergence = same = 0.0
    places = [part.hidden[:, -1 - judged.shape[1] : -1].flatten(0, 1) for part in (read, base) if part is not None]
    for start in range(0, len(targets), _PIECE):
        stop = start + _PIECE
        mine = logits(read.model, places[0][start:stop], read.kernels, device).log_softmax(-1)
        wanted = targets[start:stop].to(mine.device)
        lost -= float(mine.gather(1, wanted[:, None]).double().sum())
        if base is not None:
            theirs = logits(base.model, places[1][start:stop], base.kernels, device).log_softmax(-1)
            divergence += float((theirs.exp() * (theirs - mine)).sum(dtype=torch.float64))
            same += float((theirs.argmax(-1) == mine.argmax(-1)).sum())
    count = len(targets)
    return Quality(
        model=name,
        weight_bytes=read.weight_bytes,
        perplexity=math.exp(min(lost / count, 700.0)),
        kl=None if base is None else max(divergence / count, 0.0),
        agreement=None if base is None else same / count,
        tasks=_share_right(name, asked) if asked.tasks else None,
        tokens_per_s=_speed(name, asked) if asked.speed else None,
    )


def read_tasks(path: Path) -> list[QualityTask]:
    """Read tasks from a file of JSON lines: {"prompt", "choices": [...], "answer": index} or {"prompt", "answer":
    text}."""
    lines = list(lines_of(read_text_file(path, "--tasks", MOST_TASK_CHARS)))
    if not 0 < len(lines) <= MOST_TASKS:
        raise ParameterError(f"--tasks {path} has {len(lines)} lines; 1 to {MOST_TASKS} are taken.")
    return [_task(path, number, line) for number, line in lines]


def _task(path: Path, number: int, line: str) -> QualityTask:
    try:
        entry = json.loads(line)
        prompt, answer, choices = entry["prompt"], entry["answer"], entry.get("choices")
        if odd := sorted(entry.keys() - {"prompt", "choices", "answer"}):
            raise ParameterError(f"--tasks {path}, line {number}: {shown(odd[0])} is no field of a task.")
        if isinstance(prompt, str) and isinstance(answer, str) and choices is None and answer.strip():
            return QualityTask(prompt, (), 0, answer)
        fits = isinstance(choices, list) and len(choices) > 1 and all(isinstance(c, str) and c for c in choices)
        if isinstance(prompt, str) and fits and type(answer) is int and 0 <= answer < len(choices):
            return QualityTask(prompt, tuple(choices), answer)
    except ParameterError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise ParameterError(f'--tasks {path}, line {number}: use {{"prompt", "choices", "answer": index}} or {{"prompt", '
                         '"answer": text}.')  # fmt: skip


def _check_tasks(source: ModelSource, tasks: list[QualityTask], reach: int) -> None:
    """Refuse tasks with nothing to score, and longer ones than the shortest context, before any work."""
    encode = source.tokenizer().encode
    for task in tasks:
        begin = encode(task.prompt)
        ends = [encode(choice, add_special_tokens=False) for choice in task.choices]
        if not begin or not all(ends):
            what = "a choice of the task" if begin else "the prompt of the task"
            raise UserError(f"{source.path}: {what} {task.prompt[:40]!r} has no tokens.")
        length = len(begin) + (max(map(len, ends)) + 1 if ends else len(encode(task.text)) + _MORE)
        if length > reach:
            raise UserError(
                f"The task {task.prompt[:40]!r} takes {length} tokens; the models' shortest context has {reach}."
            )


def _share_right(name: str, asked: Questions) -> float:
    """The share of tasks that a model answers correctly: choices by their mean log-probability, texts by greedy
    decoding."""
    from tokenmill.engine.interfaces.llm import LLM

    assert asked.tasks is not None
    right = 0
    with LLM(model=name, **_options(asked)) as llm:
        tokenizer = llm.get_tokenizer()
        for task in asked.tasks:
            begin = tokenizer.encode(task.prompt)
            if not task.choices:
                wanted = len(tokenizer.encode(task.text)) + _MORE
                params = SamplingParams(temperature=0.0, max_tokens=wanted)
                (output,) = llm.generate([{"prompt_token_ids": begin}], params, use_tqdm=False)
                right += output.outputs[0].text.strip().startswith(task.text.strip())
                continue
            ends = [tokenizer.encode(choice, add_special_tokens=False) for choice in task.choices]
            params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
            prompts = [{"prompt_token_ids": begin + end} for end in ends]
            scores = []
            for output, end in zip(llm.generate(prompts, params, use_tqdm=False), ends, strict=True):
                rows = list(zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True))[len(begin) :]
                scores.append(sum(row[token].logprob for token, row in rows if row is not None) / max(len(end), 1))
            right += max(range(len(scores)), key=scores.__getitem__) == task.answer
    return right / len(asked.tasks)


def _options(asked: Questions) -> dict[str, Any]:
    """The options of an engine for these questions."""
    return {"device": asked.device, **(asdict(asked.cache) if asked.cache is not None else {})}


def _speed(name: str, asked: Questions) -> float:
    """Tokens per second of one user's answer."""
    from tokenmill.engine.interfaces.llm import LLM

    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    with LLM(model=name, max_num_seqs=1, **_options(asked)) as llm:
        prompt = [{"prompt_token_ids": list(range(1, 9))}]
        best = math.inf
        for _ in range(3):
            start = time.perf_counter()
            (output,) = llm.generate(prompt, params, use_tqdm=False)
            best = min(best, (time.perf_counter() - start) / len(output.outputs[0].token_ids))
    return 1 / best
