"""Learning. Owns: the order of lines, the optimiser, what is told on the way, checkpoints and going on from them.

A checkpoint holds the network, the optimiser and the step: whoever goes on from it sees the same lines in the same
order. Must not know: what is learnt.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tokenmill.core.errors import ParameterError, UserError
from tokenmill.distill.students import Student
from tokenmill.distill.teacher import Teacher

STATE = "training.pt"
WARM = 20
"""Steps in which the rate rises."""


@dataclass(frozen=True, slots=True)
class Course:
    """How to learn. seconds: stop after so many, whatever step that is (0: no limit)."""

    steps: int
    batch: int
    rate: float
    every: int
    seed: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Told:
    """Where the learning stands: step, loss, and on held-out lines the share of right guesses by place (if judged)."""

    step: int
    steps: int
    loss: float
    right: list[float] | None
    seconds: float


def train(
    teacher: Teacher, student: Student, lines: tuple[Tensor, Tensor], course: Course, folder: Path,
    tell: Callable[[Told], None], *, resume: bool = False,
) -> list[float]:  # fmt: skip
    """Learn from lines[0] [n, T], be judged by lines[1]; the drafter is written to `folder` at each checkpoint."""
    torch.manual_seed(course.seed)
    parameters = [p for p in student.net.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=course.rate, betas=(0.9, 0.95), weight_decay=0.01)
    start = _resume(folder / STATE, student, optimiser, teacher.device) if resume else 0
    began, right = time.monotonic(), judge(teacher, student, lines[1], course.batch)
    step = start
    while step < course.steps:
        picked = _pick(lines[0].shape[0], course, step)
        loss = _learn(teacher, student, optimiser, lines[0][picked], course.rate * _share(step, course.steps))
        step += 1
        seconds = time.monotonic() - began
        out_of_time = bool(course.seconds) and seconds > course.seconds
        due = step % course.every == 0 or step == course.steps or out_of_time
        if due:
            right = judge(teacher, student, lines[1], course.batch)
            save(folder, student)
            torch.save(
                {"net": student.net.state_dict(), "optimiser": optimiser.state_dict(), "step": step}, folder / STATE
            )
        tell(Told(step, course.steps, loss, right if due else None, seconds))
        if out_of_time:
            break
    return right


def _learn(teacher: Teacher, student: Student, optimiser: torch.optim.Optimizer, tokens: Tensor, rate: float) -> float:
    for group in optimiser.param_groups:
        group["lr"] = rate
    states = teacher.states(tokens, logits=student.wants_logits)
    with torch.enable_grad():
        loss, _ = student.loss(states)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
    torch.nn.utils.clip_grad_norm_(student.net.parameters(), 1.0)
    optimiser.step()
    value = loss.item()
    if not math.isfinite(value):
        raise UserError("The loss is not finite any more: try a smaller --rate.")
    return value


@torch.no_grad()
def judge(teacher: Teacher, student: Student, lines: Tensor, batch: int) -> list[float]:
    """The share of right guesses by place, over held-out lines."""
    found = [
        student.loss(teacher.states(part, logits=student.wants_logits))[1] * part.shape[0]
        for part in lines[: 8 * batch].split(batch)
    ]
    return (torch.stack(found).sum(0) / min(lines.shape[0], 8 * batch)).tolist()


def save(folder: Path, student: Student) -> None:
    """config.json and model.safetensors, in bfloat16."""
    config, tensors = student.files()
    plain = {name: value.detach().to(torch.bfloat16).contiguous().cpu() for name, value in tensors.items()}
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def _pick(count: int, course: Course, step: int) -> Tensor:
    """The lines of a step: every line once, in an order that depends on the seed alone, then again in another."""
    per = max(1, count // course.batch)
    generator = torch.Generator().manual_seed(course.seed * 1_000_003 + step // per)
    order = torch.randperm(count, generator=generator)
    at = step % per * course.batch
    return order[at : at + course.batch]


def _share(step: int, steps: int) -> float:
    """Of the rate: up at first, then down to a tenth of it."""
    if step < WARM:
        return (step + 1) / WARM
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, step / max(1, steps))))


def _resume(path: Path, student: Student, optimiser: torch.optim.Optimizer, device: str) -> int:
    try:
        found = torch.load(path, map_location=device, weights_only=True)
        student.net.load_state_dict(found["net"])
        optimiser.load_state_dict(found["optimiser"])
        return int(found["step"])
    except FileNotFoundError:
        return 0
    except Exception as error:
        raise ParameterError(
            f"--resume: {path} does not fit what is asked for ({str(error).splitlines()[0]})."
        ) from error
