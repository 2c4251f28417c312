"""Learning. Owns: the order of lines, the optimiser, what is told on the way, checkpoints and going on from them.

A checkpoint holds the network, the optimiser, the step and what decides on the order of lines: whoever goes on from it
sees the same lines in the same order. Must not know: what is learnt.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tokenmill.checkpoint.new_folder import new_file
from tokenmill.core.errors import ParameterError, UserError
from tokenmill.distill.students import Student
from tokenmill.distill.teacher import Teacher
from tokenmill.distill.texts import Lines

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
class TrainProgress:
    """Where the learning stands: step, loss, on held-out lines the share of right guesses by place (if judged), and the
    seconds that are left."""

    step: int
    steps: int
    loss: float
    right: list[float] | None
    left: float


def train(
    teacher: Teacher, student: Student, lines: tuple[Lines, Lines], course: Course, folder: Path,
    tell: Callable[[TrainProgress], None], *, resume: bool = False,
) -> list[float]:  # fmt: skip
    """Learn from lines[0], be judged by lines[1]; the drafter is written to `folder` at each checkpoint."""
    torch.manual_seed(course.seed)
    parameters = [p for p in student.net.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=course.rate, betas=(0.9, 0.95), weight_decay=0.01)
    asked = student.form | _asked(lines[0], course) | {"MODEL": teacher.mark()}
    start = _resume(folder / STATE, student, optimiser, teacher.device, asked) if resume else 0
    began, right = time.monotonic(), judge(teacher, student, lines[1], course.batch)
    step = start
    while step < course.steps:
        picked = lines[0].at(_pick(len(lines[0]), course, step))
        done = step / course.steps
        if course.seconds:
            done = max(done, (time.monotonic() - began) / course.seconds)
        loss = _learn(teacher, student, optimiser, picked, course.rate * _share(step, done))
        step += 1
        seconds = time.monotonic() - began
        out_of_time = bool(course.seconds) and seconds > course.seconds
        due = step % course.every == 0 or step == course.steps or out_of_time
        if due:
            right = judge(teacher, student, lines[1], course.batch)
            save(folder, student)
            state = {"net": student.net.state_dict(), "optimiser": optimiser.state_dict(), "step": step}
            state["asked"] = asked
            with new_file(folder / STATE) as file:
                torch.save(state, file)
        left = seconds / (step - start) * (course.steps - step)
        if course.seconds:
            left = max(0.0, min(left, course.seconds - seconds))
        tell(TrainProgress(step, course.steps, loss, right if due else None, left))
        if out_of_time:
            break
    return right


def _learn(teacher: Teacher, student: Student, optimiser: torch.optim.Optimizer, lines: Lines, rate: float) -> float:
    for group in optimiser.param_groups:
        group["lr"] = rate
    optimiser.zero_grad(set_to_none=True)
    value = 0.0
    for part in _parts(teacher, lines):
        states = teacher.states(part.tokens, part.own, logits=student.wants_logits)
        with torch.enable_grad():
            loss, _ = student.loss(states)
            share = len(part) / len(lines)
            (loss * share).backward()
        value += loss.item() * share
    torch.nn.utils.clip_grad_norm_(student.net.parameters(), 1.0)
    optimiser.step()
    if not math.isfinite(value):
        raise UserError("The loss is not finite any more: try a smaller --rate.")
    return value


@torch.no_grad()
def judge(teacher: Teacher, student: Student, lines: Lines, batch: int) -> list[float]:
    """The share of right guesses by place, over held-out lines."""
    judged = lines.at(slice(0, 8 * batch))
    found = [
        student.loss(teacher.states(part.tokens, part.own, logits=student.wants_logits))[1] * part.own.sum()
        for part in _parts(teacher, judged)
    ]
    return (torch.stack(found).sum(0) / judged.own.sum().clamp(min=1)).tolist()


def _parts(teacher: Teacher, lines: Lines) -> Iterator[Lines]:
    """What is computed at one time: as many lines as the teacher has rows for."""
    for first in range(0, len(lines), teacher.most_lines):
        yield lines.at(slice(first, first + teacher.most_lines))


def save(folder: Path, student: Student) -> None:
    """config.json and model.safetensors, in the type that the student stores."""
    config, tensors = student.files()
    plain = {name: value.detach().to(student.stored).contiguous().cpu() for name, value in tensors.items()}
    with new_file(folder / "model.safetensors") as file:
        save_file(plain, file, metadata={"format": "pt"})
    with new_file(folder / "config.json") as file:
        file.write_text(json.dumps(config, indent=1) + "\n")


def _pick(count: int, course: Course, step: int) -> Tensor:
    """The lines of a step: every line once, in an order that depends on the seed alone, then again in another."""
    per = max(1, count // course.batch)
    generator = torch.Generator().manual_seed((course.seed * 1_000_003 + step // per) % (1 << 63))
    order = torch.randperm(count, generator=generator)
    at = step % per * course.batch
    return order[at : at + course.batch]


def _share(step: int, done: float) -> float:
    """Of the rate: up at first, then down to a twentieth of it; done: the share of the course that is behind us."""
    if step < WARM:
        return (step + 1) / WARM
    return 0.05 + 0.475 * (1 + math.cos(math.pi * min(1.0, done)))


def _asked(lines: Lines, course: Course) -> dict[str, int | str]:
    """What decides on the lines and their order, by the flags that say it."""
    seen = hashlib.sha256()
    for part in (lines.tokens, lines.own):
        seen.update(part.contiguous().numpy().tobytes())
    return {"--batch": course.batch, "--seed": course.seed, "--data, --answers or --length": seen.hexdigest()}


def _resume(
    path: Path, student: Student, optimiser: torch.optim.Optimizer, device: str, asked: dict[str, int | str]
) -> int:
    try:
        found = torch.load(path, map_location=device, weights_only=True)
        before = found.get("asked", asked)  # checkpoints of earlier versions do not say it
        other = [flag for flag, value in asked.items() if before.get(flag, value) != value]
        if not other:
            student.net.load_state_dict(found["net"])
            optimiser.load_state_dict(found["optimiser"])
            return int(found["step"])
    except FileNotFoundError:
        return 0
    except Exception as error:
        raise ParameterError(
            f"--resume: {path} does not fit what is asked for ({str(error).splitlines()[0]})."
        ) from error
    raise ParameterError(
        f"--resume: {path} was learnt with another {' and another '.join(other)}: say the same, or name another folder."
    )
