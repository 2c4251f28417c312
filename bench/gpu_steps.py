"""Times a decode step of whole engines on an NVIDIA GPU, with other tiles for products of few rows in turn.

python bench/gpu_steps.py GEOMETRY [--rows 32] [--layers 8] [--turns 3] [--cut NAME=BN,HEIGHT,PARTS,STAGES[;...]] ...
python bench/gpu_steps.py GEOMETRY --quantization fp8 --rows 1 --cut "qkv=gemv,8,256,2,0;o=gemv,4,512,4,0" ...
python bench/gpu_steps.py GEOMETRY --devices 2 --without - --without exchange ...

GEOMETRY is one of geometries.py (dense ones), cut down to some layers. Measured are: all products by programs that
share (`--disable few-rows`), the rule's tiles, and then each --cut: what it does not name is as the rule says. NAME:
qkv, o, gate, down or head; NAME=none leaves a product to programs that share. A cut that begins with a word is a way of
a packed weight (narrow_linear.py). Or, with --without, engines that leave out these optimisations (-: none). A figure
is the least of some turns of 256 steps; the other one is the least of some turns of one step that computes all prompts,
of 128 tokens each.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import tempfile
import time
from typing import Any

from geometries import GEOMETRIES, few_layers

Cuts = dict[str, tuple[Any, ...] | None]


def read_cuts(said: str) -> Cuts:
    """NAME=BN,HEIGHT,PARTS,STAGES;... or NAME=none."""
    found: Cuts = {}
    for each in said.split(";"):
        name, _, cut = each.partition("=")
        read = [int(n) if n.isdigit() else n for n in cut.split(",")]
        found[name.strip()] = None if cut == "none" else tuple(read)
    return found


class Replaced:
    """The rule for tiles, but for some of a model's products."""

    def __init__(self, config: dict[str, Any], rows: int) -> None:
        from tokenmill.kernels.triton import multiply
        from tokenmill.kernels.triton.products import chosen, ways_by_shape

        self.config, self.rows = config, rows
        self.rule, self.narrow_rule = ways_by_shape.stream_cut, multiply.narrow_way
        self.cuts: Cuts = {}
        multiply.narrow_way = self.narrow  # type: ignore[attr-defined]
        for module in (chosen, multiply):
            module.stream_cut = self  # type: ignore[attr-defined]

    def _name(self, width: int, inner: int, gated: bool) -> str:
        if gated:
            return "gate"
        if width == self.config["vocab_size"]:
            return "head"
        if width != self.config["hidden_size"]:
            return "qkv"
        return "down" if inner == self.config["intermediate_size"] else "o"

    def narrow(self, launch: Any, x: Any, weight: Any, act: str | None) -> tuple[Any, ...]:
        """The way of a packed weight. (Kernels for one row take minutes to compile for many.)"""
        gated = act is not None and act.endswith("_mul")
        cut = self.cuts.get(self._name(weight.shape[0], weight.shape[1], gated)) if x.shape[0] == self.rows else None
        return cut or self.narrow_rule(launch, x, weight, act)

    def __call__(
        self, rows: int, width: int, inner: int, *, gated: bool = False, parts: bool = False, **rest: int
    ) -> tuple[int, ...] | None:
        name = self._name(width, inner, gated)
        if name not in self.cuts or isinstance((self.cuts[name] or (0,))[0], str):
            return self.rule(rows, width, inner, gated=gated, parts=parts, **rest)
        cut = self.cuts[name]
        return cut if cut is None or (cut[2] > 1) == parts else None


def seconds_of_steps(
    config: dict[str, Any], rows: int, turns: int, disable: str | None, devices: int, quantization: str | None
) -> tuple[float, float]:
    """Of an engine that is started for it: a step of all rows, and one of their prompts."""
    from tokenmill import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(config))
        llm = LLM(
            folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=max(rows, 2),
            gpu_memory_utilization=0.5, disable=disable, tensor_parallel_size=devices, quantization=quantization,
        )  # fmt: skip
        prompts = [{"prompt_token_ids": [(7 * i + j) % 30000 + 5 for j in range(128)]} for i in range(rows)]

        def run(tokens: int) -> float:
            params = [SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)] * rows
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            took = time.perf_counter() - began
            llm.reset_prefix_cache()
            return took

        run(16)
        prompt = min(run(1) for _ in range(turns))
        least = min((run(272) - run(16)) / 256 for _ in range(turns))
        llm.close()
    return least, prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("geometry", choices=sorted(GEOMETRIES))
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--devices", type=int, default=1, help="cards that share each matrix; without --cut")
    parser.add_argument("--quantization")
    parser.add_argument("--cut", action="append", default=[])
    parser.add_argument("--without", action="append", default=[], help="what --disable leaves out, in place of --cut")
    options = parser.parse_args()
    if options.cut and (options.without or options.devices > 1):
        parser.error("--cut changes tiles in this process: leave out --without and --devices")
    config = few_layers(GEOMETRIES[options.geometry], options.layers)
    replaced = Replaced(config, options.rows)
    cases = [("few-rows", "few-rows"), ("the rule", None), *((cut, None) for cut in options.cut)]
    if options.without:
        cases = [(f"without {each}", None if each == "-" else each) for each in options.without]
    for said, disable in cases:
        replaced.cuts = read_cuts(said) if "=" in said else {}
        took, prompt = seconds_of_steps(config, options.rows, options.turns, disable, options.devices,
                                         options.quantization)  # fmt: skip
        print(
            f"{options.geometry} {options.rows} rows, {options.layers} layers: {took * 1e6:8.1f} us a step, prompts "
            f"{prompt * 1e3:7.1f} ms: {said}"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
