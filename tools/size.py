"""Lines of every package and the ceilings of ARCHITECTURE: files, functions, parameters, dataclass fields.

Owns: the numbers below. Knows only text and syntax trees, so it runs without installing anything. Exit status 1 when
something is over.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES, KERNEL_LINES, MODEL_LINES = 500, 800, 150
FUNCTION_LINES, PARAMETERS, FIELDS = 80, 8, 12
SHARED_MODEL_FILES = {
    *("__init__.py", "decoder.py", "config_fields.py", "registry.py"),
    *("family_of.py", "foreign.py", "foreign_caches.py", "mixers.py", "parts.py", "positions.py", "family_row.py"),
    "rules.py",
    *("table.py", "table_mixtures.py", "table_recent.py", "table_older.py", "table_states.py", "multimodal.py"),
}
CODE = ("src/tokenmill", "csrc", "tools", "bench", "train")
# The public sampling options, and the two mutable records that the scheduler owns.
EXEMPT_FIELDS = {"SamplingParams", "Sequence", "SequenceGroup"}
CPP = {".cpp", ".h", ".inl"}
_CPP_NOT_FUNCTION = re.compile(r"^(namespace|extern|struct|class|enum|union|#|//|template\s*<[^>]*>\s*struct)")


def main() -> int:
    """Print the table, then what is over its ceiling."""
    lines: dict[str, list[tuple[int, str]]] = defaultdict(list)
    over: list[str] = []
    for path in _files():
        text = path.read_text(encoding="utf-8").splitlines()
        name = path.relative_to(ROOT).as_posix()
        lines[_package(path)].append((len(text), path.name))
        if len(text) > _file_ceiling(name):
            over.append(f"{name}: {len(text)} lines, ceiling {_file_ceiling(name)}")
        if path.suffix in CPP:
            over += _cpp_functions(name, text)
        elif "kernels/triton" not in name:
            over += _python_ceilings(name, "\n".join(text))
    print(f"{'package':32} {'files':>5} {'lines':>6}  largest file")
    for package, files in sorted(lines.items()):
        size, name = max(files)
        print(f"{package:32} {len(files):5} {sum(n for n, _ in files):6}  {name} {size}")
    total = sum(n for files in lines.values() for n, _ in files)
    print(f"{'all':32} {sum(map(len, lines.values())):5} {total:6}")
    for line in over:
        print(f"OVER  {line}")
    return 1 if over else 0


def _files() -> list[Path]:
    found = [p for top in CODE for p in sorted((ROOT / top).rglob("*")) if p.suffix in CPP | {".py"}]
    return [p for p in found if "__pycache__" not in p.parts]


def _package(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    depth = 3 if parts[0] == "src" else 1
    return "/".join(parts[: min(depth, len(parts) - 1)])


def _file_ceiling(name: str) -> int:
    if name.startswith("csrc/") or "/kernels/" in name:
        return KERNEL_LINES
    if "/models/" in name and Path(name).name not in SHARED_MODEL_FILES:
        return MODEL_LINES
    return FILE_LINES


def _python_ceilings(name: str, text: str) -> list[str]:
    over = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                over.append(f"{name}:{node.lineno} {node.name}: {length} lines, ceiling {FUNCTION_LINES}")
            wanted = _parameters(node.args)
            if wanted > PARAMETERS and not name.startswith("src/tokenmill/cli/"):
                over.append(f"{name}:{node.lineno} {node.name}: {wanted} parameters, ceiling {PARAMETERS}")
        elif isinstance(node, ast.ClassDef) and node.name not in EXEMPT_FIELDS and _is_dataclass(node):
            fields = sum(isinstance(line, ast.AnnAssign) and not _is_class_var(line) for line in node.body)
            if fields > FIELDS:
                over.append(f"{name}:{node.lineno} {node.name}: {fields} fields, ceiling {FIELDS}")
    return over


def _parameters(args: ast.arguments) -> int:
    names = [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    return len(names) - (bool(names) and names[0] in ("self", "cls"))


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def _is_class_var(line: ast.AnnAssign) -> bool:
    return "ClassVar" in ast.unparse(line.annotation)


def _cpp_functions(name: str, text: list[str]) -> list[str]:
    """Functions at the left margin: from the line that opens a brace to the next closing brace at the margin."""
    over, start = [], None
    for number, line in enumerate(text, 1):
        if start is None and line[:1].strip() and line.rstrip().endswith("{") and not _CPP_NOT_FUNCTION.match(line):
            start = number
        elif line.startswith("}"):
            if start is not None and number - start + 1 > FUNCTION_LINES:
                over.append(f"{name}:{start}: function of {number - start + 1} lines, ceiling {FUNCTION_LINES}")
            start = None
    return over


if __name__ == "__main__":
    sys.exit(main())
