"""Writes the table of measured ways from what bench/gpu_ways.py timed, and says what the rule for other shapes loses.

python bench/fit_ways.py TIMES.json ... [--table TABLE] [--device "NVIDIA H200"]

TABLE is src/tokenmill/kernels/triton/products/measured.json. Operations that the table has already stay as they are.
Without --table only the errors are printed: for each number of rows how much slower the chosen way is than the best
one, by the nearest measured shape (all shapes with the same number of columns left out) and by the default rule.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
from collections import defaultdict

from tokenmill.kernels.triton.products.ways_by_shape import Way, default_way, nearest_way, operation, samples

Shape = tuple[int, int, str | None, bool]
Times = dict[tuple[Shape, int], dict[Way, float]]


def read(paths: list[pathlib.Path]) -> Times:
    """{(shape, rows): {way: microseconds}}; of equal operations the first counts."""
    found: Times = {}
    for path in paths:
        part: dict[tuple[Shape, int, bool], dict[Way, float]] = defaultdict(dict)
        for out, inner, act, normed, added, rows, way, us in json.loads(path.read_text()):
            part[(out, inner, act, normed), rows, added][tuple(way)] = us
        for (shape, rows, _), ways in part.items():
            found.setdefault((shape, rows), ways)
    return found


def best(ways: dict[Way, float]) -> Way:
    return min(ways, key=lambda way: ways[way])


def table_of(times: Times) -> dict[str, Way]:
    """The best way of every operation."""
    return {operation(rows, s[:2], s[2], s[3]): best(ways) for (s, rows), ways in times.items()}


def errors(times: Times) -> None:
    """Print what each rule loses."""
    for rows in sorted({rows for _, rows in times}):
        near, plain, unknown = [], [], 0
        for (shape, m), ways in times.items():
            if m != rows:
                continue
            others = {key: w for key, w in times.items() if key[1] == rows and key[0][1] != shape[1]}
            gated, least = shape[2] is not None, ways[best(ways)]
            way = nearest_way(samples(table_of(others)), rows, shape[:2], gated=gated, normed=shape[3])
            width = shape[0] // 2 if gated else shape[0]
            for found, losses in (
                (way, near), (default_way(rows, width, shape[1], gated=gated), plain),
            ):  # fmt: skip
                if found in ways:
                    losses.append(ways[found] / least - 1)
                else:
                    unknown += 1
        for name, losses in (("nearest", near), ("default", plain)):
            if losses:
                middle, mean, worst = statistics.median(losses), statistics.mean(losses), max(losses)
                print(f"{rows:3} rows, {name}: median {middle:.3f}, mean {mean:.3f}, worst {worst:.3f} ({len(losses)})")
        print(f"          ways that were not timed: {unknown}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("times", nargs="+", type=pathlib.Path)
    parser.add_argument("--table", type=pathlib.Path)
    parser.add_argument("--device", default="NVIDIA H200")
    options = parser.parse_args()
    times = read(options.times)
    errors(times)
    if options.table:
        every = json.loads(options.table.read_text())
        known = every.setdefault(options.device, {})
        every[options.device] = {**{name: list(way) for name, way in table_of(times).items()}, **known}
        text = json.dumps(every, indent=1).replace("\n   ", "").replace("\n  ]", "]")
        options.table.write_text(text + "\n")


if __name__ == "__main__":
    main()
