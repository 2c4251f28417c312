"""Runs whole models on a GPU that is not there, and compiles every kernel that they launch there. Needs no GPU.

python bench/gpu_compile.py [CASE ...] [--device sm_90] [--layers N] [--no-compile] [--only NAME,...] [--json OUT]

CASEs are below (default: all of them), or GEOMETRY:FORMAT with a name of geometries.py and one of FORMATS; ":FORMAT"
and "GEOMETRY:" stand for all of the other. Each loads a model of real geometry without numbers, records its steps,
serves the workloads of its case, and then compiles what was launched for the device (compiler and ptxas come with
Triton). Shown are shared memory, registers and spills of each kernel, what would be compiled only while requests wait
("late"), and problems (recordings that wait, cross devices or read memory that is given back; grids that do
not fit; operations that fell back to plain torch; kernels that do not compile or do not fit). Any problem: exit
status 1.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from typing import Any

from geometries import GEOMETRIES, few_layers
from gpu_standin import DEVICES, Kernel, Standin, installed

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
SMALL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 768,
    "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 6144,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 100000.0, "hidden_act": "silu",
    "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
EAGLE3 = {**LLAMA, "num_hidden_layers": 1, "draft_vocab_size": 32000, "speculative": {"method": "eagle3"},
          "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 1, 1]}}  # fmt: skip
MEDUSA = {"num_heads": 3, "num_hidden_layers": 1, "speculative": {"method": "medusa"}}
TREE = {"speculative_token_tree": "best", "num_speculative_tokens": 16}
Requests = list[tuple[int, int, int]]
"""(prompt tokens, of which shared with all others, tokens to make)."""
SINGLE: Requests = [(128, 0, 40)]
SOME: Requests = [(128, 0, 20)] * 32
PREFIX: Requests = [(2176, 2048, 24)] * 256
LONG: Requests = [(16000, 0, 8)] * 16
MIXED: Requests = [(128 + 97 * i % 897, 0, 8 + 13 * i % 57) for i in range(512)]
ALONE: Requests = [(n, 0, 2) for n in (1, 2, 3, 6, 12, 30, 60, 100, 200, 400, 511, 513, 700, 1025, 2049, 4097, 9000)]
ODD: Requests = [(1 + 7 * i % 300, 0, 3 + i % 29) for i in range(200)]


@dataclass(frozen=True, slots=True)
class Case:
    """A model, how it is loaded, and what it serves."""

    config: dict[str, Any]
    served: dict[str, Requests]
    options: dict[str, Any] = field(default_factory=dict)
    draft: dict[str, Any] | None = None
    """The config of a model that drafts, with its method's settings under "speculative"."""
    adapter: tuple[str, ...] = ()
    """Every second request has an adapter of these matrices of every expert."""


DENSE = {
    "single": SINGLE,
    "choices": SOME,
    "alone": ALONE,
    "batch32": SOME,
    "mixed": MIXED,
    "prefix": PREFIX,
    "long": LONG,
    "odd": ODD,
}
CHOICES: list[dict[str, Any]] = [  # log-probabilities are left out: reading them is reading numbers
    {"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    {"temperature": 1.0, "top_k": 40, "min_p": 0.1},
    {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    {"temperature": 0.0, "logit_bias": {5: 2.0}, "min_tokens": 2}, {"temperature": 0.0, "allowed_token_ids": [7, 8, 9]},
]  # fmt: skip
LITTLE = {"single": SINGLE, "choices": SOME, "alone": ALONE[:-2], "odd": ODD}
EXPERTS = {"single": SINGLE, "alone": ALONE[:-1], "batch32": SOME, "mixed": MIXED, "odd": ODD}
CASES = {
    "8b-bf16": Case(LLAMA, DENSE),
    "8b-fp8": Case(LLAMA, DENSE, {"quantization": "fp8"}),
    "8b-fp8-kv8": Case(LLAMA, DENSE, {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    "8b-int8": Case(LLAMA, DENSE, {"quantization": "int8"}),
    "8b-int4": Case(LLAMA, DENSE, {"quantization": "int4"}),
    "8b-int4-g128": Case(LLAMA, DENSE, {"quantization": "int4-g128"}),
    "8b-kv-int8": Case(LLAMA, DENSE, {"kv_cache_dtype": "int8"}),
    "8b-kv-int4": Case(LLAMA, DENSE, {"kv_cache_dtype": "int4"}),
    "8b-deterministic": Case(LLAMA, DENSE, {"deterministic": True}),
    "8b-lora": Case(LLAMA, DENSE, {"enable_lora": True, "max_loras": 4}),
    "8b-plain": Case(LLAMA, DENSE, {"disable": "fusion,cascade,dependent-launch,few-rows,many-rows"}),
    "30b-a3b": Case(MOE, EXPERTS, {"max_model_len": 8192}),
    "30b-a3b-one": Case(MOE, {"single": SINGLE}, {"max_model_len": 8192, "max_num_seqs": 2}),
    "30b-a3b-lora": Case(
        MOE,
        EXPERTS,
        {"max_model_len": 8192, "enable_lora": True, "max_loras": 2},
        adapter=("gate_up_proj", "down_proj"),
    ),
    "30b-a3b-fp8": Case(MOE, EXPERTS, {"max_model_len": 8192, "quantization": "fp8"}),
    "30b-a3b-int4": Case(MOE, EXPERTS, {"max_model_len": 8192, "quantization": "int4-g128"}),
    "20b-mxfp4": Case(
        GEOMETRIES["gpt-oss-20b"] | {"quantization_config": {"quant_method": "mxfp4"}},
        EXPERTS,
        {"max_model_len": 8192},
    ),
    "8b-draft": Case(LLAMA, LITTLE, draft=GEOMETRIES["llama-3.2-1b"]),
    "8b-ngram": Case(LLAMA, LITTLE, {"speculative_config": {"method": "ngram"}}),
    "8b-medusa": Case(LLAMA, LITTLE, draft=MEDUSA),
    "8b-eagle3": Case(LLAMA, LITTLE, draft=EAGLE3),
    "8b-medusa-tree": Case(LLAMA, LITTLE, draft=MEDUSA | {"speculative": {"method": "medusa", **TREE}}),
    "8b-eagle3-tree": Case(LLAMA, LITTLE, draft=EAGLE3 | {"speculative": {"method": "eagle3", **TREE}}),
    "8b-tree-deterministic": Case(
        LLAMA, LITTLE, {"deterministic": True}, draft=EAGLE3 | {"speculative": {"method": "eagle3", **TREE}}
    ),
    "small": Case(SMALL, LITTLE | {"mixed": MIXED}, {"max_model_len": 4096}),
    "small-fp8": Case(
        SMALL, {"single": SINGLE, "alone": ALONE[:-2], "odd": ODD}, {"max_model_len": 4096, "quantization": "fp8"}
    ),
    "small-int4": Case(
        SMALL, {"single": SINGLE, "alone": ALONE[:-2], "odd": ODD}, {"max_model_len": 4096, "quantization": "int4"}
    ),
}
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {}, "fp8": {"quantization": "fp8"}, "int8": {"quantization": "int8"}, "int4": {"quantization": "int4"},
    "int4-g128": {"quantization": "int4-g128"}, "int4-f16": {"quantization": "int4-g128", "dtype": "float16"},
    "w4a8": {"quantization": "w4a8"}, "kv-fp8": {"kv_cache_dtype": "fp8"}, "kv-int8": {"kv_cache_dtype": "int8"},
    "kv-int4": {"kv_cache_dtype": "int4"},
    "kv-int4-fp8k": {"kv_cache_dtype": "int4-fp8k"}, "kv-int8-g32": {"kv_cache_dtype": "int8", "kv_cache_group": 32},
    "deterministic": {"deterministic": True},
}  # fmt: skip
"""Of weights, or of keys and values."""
ANY: dict[str, Requests] = {
    "alone": [(n, 0, 2) for n in (1, 3, 12, 60, 200, 513, 1025, 2100)], "choices": SOME, "batch32": SOME,
    "prefix": [(700 + 3 * i, 600, 6) for i in range(70)], "mixed": [(128 + 97 * i % 897, 0, 4) for i in range(140)],
}  # fmt: skip
"""What every geometry serves."""
MEASURE = "doctor"
"""What is measured instead of served: minutes."""


def case_of(name: str) -> Case:
    """By its name, or a geometry in a format."""
    geometry, _, form = name.partition(":")
    if name not in CASES if not form else geometry not in GEOMETRIES or form not in FORMATS:
        raise SystemExit(f"{name}: a case is one of {', '.join(sorted(CASES))}; or GEOMETRY:FORMAT")
    if not form:
        return CASES[name]
    return Case(GEOMETRIES[geometry], ANY, {"max_model_len": 4096, "max_num_seqs": 128, **FORMATS[form]})


def named(given: list[str]) -> list[str]:
    """Cases, with what is left out of GEOMETRY:FORMAT filled in."""
    found = []
    for name in given:
        geometry, colon, form = name.partition(":")
        if not colon:
            found.append(name)
            continue
        found += [f"{g}:{f}" for g in ([geometry] if geometry else GEOMETRIES) for f in ([form] if form else FORMATS)]
    return found


def measure(standin: Standin) -> set[tuple[Any, str]]:
    """What `tokenmill doctor --measure` runs."""
    from tokenmill.cli.doctor import TYPES
    from tokenmill.measure import calibrate_compile
    from tokenmill.measure.calibrate import measure_calibrated
    from tokenmill.measure.ceilings import read_measured

    calibrate_compile._PART_BYTES = 1 << 60  # nothing is compiled in processes that know no stand-in
    standin.phase = MEASURE
    read_measured(measure_calibrated("cuda", TYPES["gpu"]), "measured")
    return set(standin.kernels)


def _positions(config: dict[str, Any]) -> int:
    """The most that the config states; Mamba's states none."""
    stated = [config.get(name) for name in ("n_positions", "max_position_embeddings", "max_seq_len")]
    return min((count for count in stated if isinstance(count, int)), default=1 << 20)


def write_adapter(config: dict[str, Any], modules: tuple[str, ...], folder: pathlib.Path) -> pathlib.Path:
    """A PEFT folder of zeros."""
    import torch
    from safetensors.torch import save_file

    inner, hidden, tensors = config["moe_intermediate_size"], config["hidden_size"], {}
    for layer in range(config["num_hidden_layers"]):
        for expert in range(config["num_experts"]):
            for module in modules:
                out, into = (hidden, inner) if module == "down_proj" else (2 * inner, hidden)
                name = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{module}"
                tensors[f"{name}.lora_A.weight"] = torch.zeros(8, into, dtype=torch.bfloat16)
                tensors[f"{name}.lora_B.weight"] = torch.zeros(out, 8, dtype=torch.bfloat16)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": list(modules)}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


def serve(standin: Standin, case: Case, layers: int) -> set[tuple[Any, str]]:
    """Load and serve -> kernels that were there when loading was done."""
    from tokenmill import LLM, SamplingParams
    from tokenmill.core.drafting import AllOfThem
    from tokenmill.core.params import LoRARequest

    config = few_layers(case.config, layers)
    options = {"max_model_len": 32768, "max_num_seqs": 512, **case.options}
    options["max_model_len"] = min(options["max_model_len"], _positions(config))
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(config))
        if case.draft is not None:
            other = pathlib.Path(folder) / "draft"
            other.mkdir()
            settings = {"num_speculative_tokens": 3, **case.draft.get("speculative", {})}
            config = {name: value for name, value in case.draft.items() if name != "speculative"}
            (other / "config.json").write_text(json.dumps(few_layers(config, layers)))
            options["speculative_config"] = {"model": str(other), **settings}
        standin.phase = "load"
        llm = LLM(model=folder, load_format="dummy", skip_tokenizer_init=True, device="cuda", **options)
        adapter = None
        if case.adapter:
            adapter = LoRARequest("one", 1, str(write_adapter(config, case.adapter, pathlib.Path(folder) / "one")))
            llm.generate(
                [{"prompt_token_ids": [1, 2]}], lora_request=adapter, use_tqdm=False
            )  # recorded anew behind it
        if case.draft is not None:  # times mean nothing here, so no control would guess
            llm.engine.scheduler.ahead.control = AllOfThem(llm.engine.scheduler.limits.max_guesses)
    ready = set(standin.kernels)
    for name, served in case.served.items():
        requests = [one for one in served if one[0] + one[2] <= options["max_model_len"]]
        standin.phase = name
        prompts = [
            {"prompt_token_ids": [*range(shared), *((i * 31 + n) % 5000 for n in range(length - shared))]}
            for i, (length, shared, _) in enumerate(requests)
        ]
        choices = CHOICES if name == "choices" else [{"temperature": 0.0}]
        wanted = [
            SamplingParams(max_tokens=made, ignore_eos=True, **choices[i % len(choices)])
            for i, (_, _, made) in enumerate(requests)
        ]
        if name == "alone":  # one after the other
            outputs = [
                llm.generate([p], [w], use_tqdm=False, lora_request=adapter)[0]
                for p, w in zip(prompts, wanted, strict=True)
            ]
        else:
            adapters = [adapter if i % 2 else None for i in range(len(prompts))]
            outputs = llm.generate(prompts, wanted, use_tqdm=False, lora_request=adapters)
        for output, (_, _, made) in zip(outputs, requests, strict=True):
            if len(output.outputs[0].token_ids) != made:
                one = output.outputs[0]
                standin.problem(f"{name}: {one.finish_reason} after {len(one.token_ids)} tokens: {one.stop_reason}")
    standin.check_memory()
    counters = llm.engine.executor.control({"what": "counters"})["kernels"]
    for operation, counted in counters.items():
        if counted["fallbacks"]:
            standin.fallbacks[operation] = counted["fallbacks"]
            standin.problem(f"{operation} fell back to plain torch")
    llm.close()
    return ready


def _made(kernel: Kernel) -> Any:
    return kernel.function._do_compile(
        kernel.key, kernel.signature, 0, kernel.constants, kernel.options, kernel.attributes, True
    )


def assembly(kernel: Kernel) -> str:
    """Compile one kernel for the device: its instructions."""
    return _shown(_made(kernel), "-sass")


def compiled(kernel: Kernel) -> dict[str, Any]:
    """Compile one kernel for the device: what it takes."""
    found = _made(kernel)
    text = _shown(found, "-res-usage")
    waits = "wgmma" in found.asm["ptx"] and _waits(found.asm["ptx"], _shown(found, "-sass"))
    usage = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    lowered = re.search(r"\.maxntid (\d+)|\.reqntid (\d+)", found.asm["ptx"])
    threads = int(next(filter(None, lowered.groups()))) if lowered else 32 * found.metadata.num_warps
    return {
        "shared": found.metadata.shared, "registers": usage["REG"], "threads": threads,
        "spilled": max(usage["STACK"], usage["LOCAL"]), "waits": waits,
    }  # fmt: skip


def _waits(ptx: str, sass: str) -> bool:
    """Did ptxas put a wait behind products of tensor cores of which the kernel asks for several at once? (It does where
    it cannot follow their operands' registers, and says nothing.)"""
    products = [line for line in sass.splitlines() if "GMMA" in line]
    ends = sum("gsb0" in line for line in products)
    asked, wanted = ptx.count("wgmma.mma_async"), ptx.count("wgmma.commit_group")
    return ends * asked > 1.5 * wanted * len(products)


def _shown(compiled: Any, what: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return subprocess.run([_tool(), what, file.name], capture_output=True, text=True, check=True).stdout


def _tool() -> str:
    import triton

    return str(pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")


def compile_all(standin: Standin, room: int, only: list[str], ready: set[tuple[Any, str]]) -> list[dict[str, Any]]:
    """Every kernel, or those whose names begin so."""
    made = []
    for place, kernel in list(standin.kernels.items()):
        if only and not any(kernel.name.startswith(name) for name in only):
            continue
        start = time.perf_counter()
        try:
            usage = compiled(kernel)
        except Exception as error:
            standin.problem(f"{kernel.name} does not compile: {str(error)[:300]} {kernel.known()}")
            continue
        if usage["shared"] > room or usage["registers"] * usage["threads"] > 1 << 16:
            standin.problem(f"{kernel.name} does not fit: {usage} {kernel.known()}")
        if usage["waits"]:
            standin.problem(f"{kernel.name}: its products wait for each other {kernel.known()}")
        made.append({"name": kernel.name, "grid": kernel.grid, "late": place not in ready, **usage})
        spilled = f", {usage['spilled']} bytes spilled" if usage["spilled"] else ""
        print(f"  {kernel.name:28} {usage['shared']:6} bytes shared, {usage['registers']:3} registers x "
              f"{usage['threads']:3}{spilled}, {time.perf_counter() - start:.1f} s", flush=True)  # fmt: skip
    return made


def _cut(kernel: Kernel) -> str:
    """The sizes it is compiled for."""
    return " ".join(
        f"{n}={v}" for n, v in kernel.known().items() if isinstance(v, int) and n.isupper() and v is not True
    )


def of_few_rows(case: Case, most: int) -> Case:
    """The same served one by one and all at once only, in an engine of at most so many sequences."""
    served: dict[str, Requests] = {
        part: case.served[part] for part in ("alone", "choices", "batch32") if part in case.served
    }
    return replace(case, served=served, options=case.options | {"max_num_seqs": most})


def run(name: str, device: str, layers: int, only: list[str], *, compiles: bool, quick: bool = False) -> dict[str, Any]:
    """One case, in this process."""
    start = time.perf_counter()
    case = case_of("small" if name == MEASURE else name)
    if quick:
        case = of_few_rows(case, 128)
    with installed(device=DEVICES[device], number=1.0 if name == MEASURE else None) as standin:
        ready = measure(standin) if name == MEASURE else serve(standin, case, layers)
    late = sorted({f"{k.name} {_cut(k)} ({k.phase})" for place, k in standin.kernels.items() if place not in ready})
    print(f"{name} {device}: {standin.launches} launches of {len(standin.kernels)} kernels, "
          f"{len(standin.captures)} recordings, {time.perf_counter() - start:.0f} s; late: {len(late)}",
          flush=True)  # fmt: skip
    for text in late:
        print("  late:", text)
    made = compile_all(standin, DEVICES[device].shared_memory, only, ready) if compiles else []
    for problem in standin.problems:
        print("  PROBLEM", problem)
    found = {"case": name, "device": device, "launches": standin.launches}
    return found | {"kernels": made, "late": late, "problems": standin.problems}


def main() -> None:
    """Each case in a process of its own, because the stand-in stays for the life of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=[], metavar="CASE")
    parser.add_argument("--device", choices=DEVICES, default="sm_90")
    parser.add_argument("--layers", type=int, default=2, help="0: as many as the model has")
    parser.add_argument("--only", default="", help="compile kernels whose names begin so, e.g. wide.,decode.")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--quick", action="store_true", help="serve one by one and all at once only, fewer sequences")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    cases = named(options.cases) or list(CASES)
    if len(cases) == 1:
        only = [part for part in options.only.split(",") if part]
        found = [
            run(cases[0], options.device, options.layers, only, compiles=not options.no_compile, quick=options.quick)
        ]
    else:
        found = []
        for name in cases:
            with tempfile.NamedTemporaryFile(suffix=".json") as file:
                more = [f"--layers={options.layers}", f"--only={options.only}", f"--json={file.name}"]
                more += (
                    [f"--device={options.device}"] + ["--no-compile"] * options.no_compile + ["--quick"] * options.quick
                )
                subprocess.run([sys.executable, __file__, name, *more], check=False)
                text = pathlib.Path(file.name).read_text()
                found += json.loads(text) if text else [{"case": name, "problems": ["the case ended early"]}]
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    sys.exit(any(part["problems"] for part in found))


if __name__ == "__main__":
    main()
