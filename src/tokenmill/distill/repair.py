"""A pruned model learns what it lost from the model that it was cut from. Owns: that student, and its files.

The copy's layers learn what the original thinks of every next token; embeddings and head stay as they are.
Must not know: how was chosen what went.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from tokenmill.checkpoint.folder import open_checkpoint, read_config
from tokenmill.checkpoint.new_folder import ended_in_order
from tokenmill.core.config import make_config
from tokenmill.core.errors import ParameterError, UserError
from tokenmill.distill.cutting import FAMILIES, last_norm, layer_tensors, shape_of
from tokenmill.distill.students import DraftStudent
from tokenmill.distill.teacher import Teacher, check_length
from tokenmill.distill.texts import Lines, cut, encode_all
from tokenmill.distill.train import Course, TrainProgress, train
from tokenmill.engine.load.model_source import ModelSource


class PrunedStudent(DraftStudent):
    """The layers of a pruned copy, with the original's embeddings and head."""

    def __init__(self, teacher: Teacher, folder: Path) -> None:
        self.raw = read_config(folder)
        shape = shape_of(self.raw)
        assert shape is not None, "checked before anything was cut"
        self.shape, self.vocab = shape, teacher.model.spec.vocab_size
        self.positions = teacher.model.spec.max_positions
        checkpoint = open_checkpoint(folder)
        try:
            found = [layer_tensors(checkpoint, n, shape) for n in range(int(self.raw["num_hidden_layers"]))]
            layers = [each for each in found if each is not None]
            assert len(layers) == len(found), "a copy is stored as plain numbers"
            self._fill(teacher, len(layers), (layers, last_norm(checkpoint)))
            self.stored = checkpoint.tensor("model.norm.weight").dtype
        finally:
            checkpoint.close()

    def files(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """As the copy said it; its tensors now."""
        return self.raw, super().files()[1]


def check(raw: dict[str, Any]) -> None:
    """Refuse a model whose copies cannot learn here."""
    if shape_of(raw) is None:
        raise ParameterError(
            f"--repair: copies of {raw.get('model_type')} cannot learn here; plain {', '.join(FAMILIES)} models can."
        )


def lines_of(source: ModelSource, texts: list[str], length: int) -> tuple[Lines, Lines]:
    """Lines of `length` tokens to learn from and to be judged by, as the model in `source` reads the texts. Too few are
    refused."""
    check_length(source, length, "--line")
    tokenizer = source.tokenizer()
    pieces = encode_all(texts, lambda text: tokenizer.encode(text, add_special_tokens=False), list(tokenizer.eos_ids))
    return cut(pieces, length, flags=("--repair", "--line"))


def repair(
    original: Path,
    folder: Path,
    lines: tuple[Lines, Lines],
    course: Course,
    device: str,
    tell: Callable[[TrainProgress], None],
) -> list[float]:
    """Teach the copy in `folder` -> the share of held-out tokens where it says what the original says. Its files change
    when the learning has ended, all at once."""
    teacher = Teacher(make_config(model=str(original), device=device), course.batch, lines[0].tokens.shape[1])
    lines = teacher.checked(lines)
    working = folder.parent / f".{folder.name}.repair"
    shutil.rmtree(working, ignore_errors=True)
    try:
        working.mkdir()
        with ended_in_order():
            right = train(teacher, PrunedStudent(teacher, folder), lines, course, working, tell)
        _replace(folder, working / "model.safetensors")
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror or error}); it is as it was cut.") from error
    except UserError as error:
        raise UserError(f"{error} {folder} is as it was cut.") from error
    finally:
        shutil.rmtree(working, ignore_errors=True)
    return right


def _replace(folder: Path, learnt: Path) -> None:
    """One file in place of the old ones."""
    # The index goes first: whoever reads the folder then takes the one file, wherever this is stopped.
    old = [folder / "model.safetensors.index.json", *folder.glob("model-*.safetensors")]
    learnt.chmod(0o644)
    learnt.replace(folder / "model.safetensors")
    for path in old:
        path.unlink(missing_ok=True)
