"""`tokenmill distill`: make a drafter for a model. Owns: its flags, and what is shown while it learns."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from tokenmill.checkpoint.new_folder import check_place, sole_writer
from tokenmill.cli.loading import Heartbeat, show_waiting
from tokenmill.cli.named_files import write_named
from tokenmill.cli.unloaded_model import look_for
from tokenmill.core.errors import ContextError, ParameterError
from tokenmill.core.files import in_home
from tokenmill.core.text_file import check_file
from tokenmill.device.named import check_device

if TYPE_CHECKING:
    from tokenmill import LLM
    from tokenmill.core.config import EngineConfig
    from tokenmill.distill.train import TrainProgress

Kind = Literal["draft", "medusa", "eagle3"]
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt", "tiktoken.model")
CHECKPOINT = ("model.safetensors", "config.json")
METHODS = {"draft": "draft_model", "medusa": "medusa", "eagle3": "eagle3"}


def distill(  # noqa: PLR0913
    model: str = typer.Argument(..., metavar="MODEL", help="Folder or hub name of the teacher, or `demo`."),
    target: Path = typer.Argument(..., metavar="DST", help="The folder to write."),
    data: Path = typer.Option(..., "--data", metavar="FILE", help="Text, or JSON lines with `text` or `prompt`."),
    kind: Kind = typer.Option("draft", "--kind", help="A small model, Medusa heads, or an EAGLE-3 head."),
    answers: int = typer.Option(
        0, "--answers", min=0, help="Learn from the model's own answers to each, of this many tokens."
    ),
    steps: int = typer.Option(2000, "--steps", min=1, help="Steps of learning."),
    minutes: float = typer.Option(
        0.0, "--minutes", min=0.0, help="Stop after this many minutes (0: when the steps are done)."
    ),
    batch: int = typer.Option(8, "--batch", min=1, max=4096, help="Lines in a step."),
    length: int = typer.Option(256, "--length", min=16, max=65536, help="Tokens in a line."),
    rate: float = typer.Option(1e-3, "--rate", min=1e-7, max=1.0, help="Learning rate."),
    heads: int = typer.Option(None, "--heads", min=1, max=16, help="Medusa heads (default: 3)."),
    hidden: int = typer.Option(None, "--hidden", min=0, help="Width of a draft model (0, the default: the teacher's)."),
    layers: int = typer.Option(None, "--layers", min=1, max=64, help="Layers of a draft model (default: 2)."),
    every: int = typer.Option(200, "--checkpoint-every", min=1, help="Steps between checkpoints."),
    resume: bool = typer.Option(False, "--resume", help="Continue from the last checkpoint in DST."),
    device: str = typer.Option("auto", "--device", help="`cpu`, `cuda`, or `auto`."),
    seed: int = typer.Option(
        0, "--seed", min=0, max=(1 << 63) - 1, help="Seed of the order of lines and the first weights."
    ),
) -> None:
    """Train a drafter for a model, which --speculative-config then uses to make the model faster.

    What DST holds after each checkpoint is ready to use."""
    for flag, given, whose in (("heads", heads, "medusa"), ("hidden", hidden, "draft"), ("layers", layers, "draft")):
        if given is not None and kind != whose:
            raise ParameterError(f"--{flag} has no effect with --kind {kind}: leave it out.")
    heads, hidden = heads or 3, hidden or 0
    if hidden % 32:
        raise ParameterError(f"--hidden {hidden} must be a multiple of 32.")
    if kind == "medusa" and length < heads + 2:
        raise ParameterError(f"--heads {heads}: the last one learns from --length {heads + 2} on.")
    check_place(target)
    if os.path.isdir(target) and any(target.iterdir()) and not resume:
        raise ParameterError(f"{target} is not empty: name another folder, or go on with --resume.")
    look_for(model)
    check_file(data, "--data")
    check_device(device)
    with show_waiting("Loading"):
        from tokenmill.device.memory import pick_device
        from tokenmill.distill.students import DraftStudent, Eagle3Student, MedusaStudent, Student, first_weights
        from tokenmill.distill.teacher import Teacher
        from tokenmill.distill.texts import cut, encode_all, read_texts
        from tokenmill.distill.train import STATE, Course, train
    pick_device(device)
    if resume:
        _check_own(model, target, STATE)
    texts = read_texts(data)
    config = _config(model, device, length)
    with sole_writer(target):
        pieces, prompts = (
            _answer(model, device, texts, answers, target / "answers.jsonl", resume=resume) if answers else (None, [])
        )
        with show_waiting("Loading the model"):
            teacher = Teacher(config, batch, length, taps=3 if kind == "eagle3" else 0)
            tokenizer = teacher.source.tokenizer()
        if pieces is None:
            pieces = encode_all(
                texts, lambda text: tokenizer.encode(text, add_special_tokens=False), list(tokenizer.eos_ids)
            )
            prompts = [0] * len(pieces)
        lines = teacher.checked(cut(pieces, length, prompts))
        student: Student
        first_weights(seed)
        if kind == "draft":
            student = DraftStudent(teacher, hidden=hidden, layers=layers or 2)
            if layers is not None and layers > student.layers:
                raise ParameterError(f"--layers {layers}: {model} has no more than {student.layers} to take from it.")
        else:
            student = MedusaStudent(teacher, heads=heads) if kind == "medusa" else Eagle3Student(teacher)
        course = Course(steps, batch, rate, every, seed, 60 * minutes)
        with _beside_checkpoints(teacher.source.path if kind == "draft" else None, target, STATE):
            right = train(teacher, student, lines, course, target, show_progress, resume=resume)
    typer.echo(f"drafts that are right on held-out text, by place: {percent(right)}")
    spec: dict[str, Any] = {"method": METHODS[kind], "model": str(target)}
    typer.echo(f"tokenmill serve {model} --speculative-config '{json.dumps(spec)}'")


def _config(model: str, device: str, length: int) -> EngineConfig:
    """The teacher's configuration; refuses lines that are too long for it."""
    from tokenmill.core.config import make_config
    from tokenmill.distill.teacher import check_length
    from tokenmill.engine.load.loading import find_model

    config = make_config(model=model, device=device)
    check_length(find_model(config), length, "--length")
    return config


def _check_own(model: str, target: Path, state: str) -> None:
    """Refuse to go on in a folder that another program has filled, or in the model's own: its weights would be lost.
    state: the file that shows that a run has begun there."""
    if os.path.exists(in_home(model)) and os.path.exists(target) and os.path.samefile(in_home(model), target):
        raise ParameterError(f"{target} is the model itself: name another folder.")
    if any(target.glob("*.safetensors")) and not (target / state).exists():
        raise ParameterError(f"--resume: {target} holds a model and no {state} to go on from: name another folder.")


def _answer(
    model: str, device: str, texts: list[str], most: int, kept: Path, *, resume: bool
) -> tuple[list[list[int]], list[int]]:
    """Prompts with the model's answers, as token ids, and the length of each prompt. They are kept for --resume as they
    come, with what was asked for."""
    asked = {"model": model, "answers": most, "texts": hashlib.sha256(json.dumps(texts).encode()).hexdigest()}
    found = _kept_answers(kept, asked) if resume and kept.exists() else {}
    if left := [n for n in range(len(texts)) if n not in found]:
        with show_waiting("Loading the model"):
            from tokenmill import LLM

            llm = LLM(model=model, device=device)
        try:
            write_named(kept, "".join(f"{json.dumps(entry)}\n" for entry in (asked, *found.values())))
            with kept.open("a") as file, Heartbeat("answering"):
                for entry in _answers(llm, texts, left, most):
                    found[entry["n"]] = entry
                    file.write(f"{json.dumps(entry)}\n")
                    file.flush()  # a kill leaves it there
        except ContextError as error:
            raise ParameterError(
                f"--data: a text of {error.prompt} tokens or more leaves no room for an answer in this model's context "
                f"of {error.context}: cut it into shorter ones."
            ) from error
        except OSError as error:
            raise ParameterError(f"{kept} cannot be written: {error.strerror}.") from error
        finally:
            llm.close()
            if not found:  # so that the folder may be named again
                kept.unlink(missing_ok=True)
    entries = [found[n] for n in range(len(texts))]
    return [entry["tokens"] for entry in entries], [entry["prompt"] for entry in entries]


def _answers(llm: LLM, texts: list[str], left: list[int], most: int) -> Iterator[dict[str, Any]]:
    """The answers to these texts, by their numbers, as they end."""
    from tokenmill import RequestOutputKind, SamplingParams
    from tokenmill.engine.interfaces.progress import progress_of

    engine = llm.llm_engine
    for n in left:
        params = SamplingParams(temperature=0.0 if n % 2 else 0.8, seed=n, max_tokens=most)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        engine.add_request(str(n), texts[n], params)
    with progress_of(sys.stderr.isatty(), len(left)) as advance:
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
                yield {"n": int(output.request_id), "prompt": len(output.prompt_token_ids), "tokens": tokens}
                advance(1)


def _kept_answers(path: Path, asked: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The answers of an earlier run by their numbers. It must have asked for the same, and may have been killed while
    it wrote the last line."""
    try:
        *lines, _ = path.read_text().split("\n")
        first, *entries = (json.loads(line) for line in lines)
        before = dict(first)
        found = {int(entry["n"]): {name: entry[name] for name in ("n", "prompt", "tokens")} for entry in entries}
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ParameterError(
            f"--resume: {path} cannot be read ({error}): remove it, and answers are made anew."
        ) from None
    if other := [name for name, value in asked.items() if before.get(name) != value]:
        flags = {"model": "MODEL", "answers": "--answers", "texts": "--data"}
        raise ParameterError(
            f"--resume: {path} holds answers of another {' and another '.join(flags[name] for name in other)}: say the "
            "same, or name another folder."
        )
    return found


@contextmanager
def _beside_checkpoints(source: Path | None, target: Path, state: str) -> Iterator[None]:
    """Copy the tokenizer: a draft model has the teacher's vocabulary. If no checkpoint comes to be whole (state: its
    last file), what there is of it goes, so that the folder may be named again."""
    names = [] if source is None else [name for name in TOKENIZER if (source / name).is_file()]
    new = [target / name for name in (*names, *CHECKPOINT) if not (target / name).exists()]
    try:
        for name in names:
            assert source is not None
            shutil.copyfile(source / name, target / name)
        yield
    except BaseException:
        if not (target / state).exists():
            for path in new:
                path.unlink(missing_ok=True)
        raise


def show_progress(told: TrainProgress) -> None:
    """Print a line at each checkpoint, and now and then between."""
    if told.right is None and told.step % 20:
        return
    right = "" if told.right is None else f"  right {percent(told.right)}"
    typer.echo(f"step {told.step}/{told.steps}  loss {told.loss:.3f}{right}  {told.left / 60:.1f} min left", err=True)


def percent(shares: list[float]) -> str:
    return ", ".join(f"{100 * share:.1f} %" for share in shares)
