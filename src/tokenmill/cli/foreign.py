"""Flags and verbs of llama.cpp, Ollama and vLLM. Owns: how each is treated if a verb has no flag of that name.

Such a name is another spelling of a flag here, or asks for what happens anyway, or is refused with advice on how to
reach the same end. A verb's own flags never come here. vLLM's names are listed in core/vllm_arguments.py. Must not
know: verbs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenmill.cli.foreign_bench import BENCH
from tokenmill.cli.foreign_kinds import Foreign, ignored, refused, same
from tokenmill.cli.loading import say
from tokenmill.core.errors import UserError
from tokenmill.core.vllm_arguments import ENGINE, SAME, SERVER, SWITCHES, parsed

_SHORT = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size",
          "-dcp": "--decode-context-parallel-size", "-cc": "--compilation-config"}  # fmt: skip
_PARTS = ("--modelfile", "--parameters", "--template", "--system", "--license")
"""Switches of `ollama show`."""
_PART = re.compile(r"(--?[A-Za-z][\w-]*)\.([^=]+)")
_OFF = ("-1", "0", "")
"""Values that switch a flag off, or ask for a default."""
_CHOICES = ("on", "off", "auto", "0", "1", "true", "false")


class RefusedFlag(UserError):
    """A flag that cannot be used. flag: the name, if no program is known that has it."""

    def __init__(self, message: str, flag: str | None = None) -> None:
        super().__init__(message)
        self.flag = flag


HARMLESS: Mapping[int, str] = {
    -1: "-fa --flash-attn -fit --fit --log-colors -rea",
    0: "--mmap --no-mmap --swa-full --perf --no-perf --repack -kvo --kv-offload --op-offload --no-op-offload --no-host "
    "-cb --cont-batching --warmup --no-warmup --jinja --metrics --slots --props --webui --ui -kvu --kv-unified "
    "--embedding --embeddings --rerank --reranking --log-prefix --log-timestamps --no-log-prefix --no-log-timestamps "
    "--no-display-prompt -cnv --conversation -i --interactive -if --interactive-first -co --color --simple-io "
    "--no-mmproj -dio --direct-io --hidethinking --no-context-shift --prefill-assistant -O0 -O1 -O2 -O3 "
    "--enable-reasoning",
    1: "-fitt --fit-target -fitc --fit-ctx -lm --load-mode -lzm --lazy-mode -O --threads-http",
}
"""Flags that are accepted silently, by how many values follow them. What they ask for is done anyway, or concerns only
how the other program works."""

_KV = {"f16": "", "bf16": "", "f32": "--kv-cache-dtype float32", "q8_0": "--kv-cache-dtype int8"}
_LAYERS = ("-ngl", "--gpu-layers", "--n-gpu-layers", "--num-gpu")
_SAMPLERS = "requests may ask for it; `serve --override-generation-config JSON` gives defaults"
LLAMA: Mapping[str, Foreign] = {
    **same("--help", "-h --usage", takes=0),
    **same("--model", "-m -hf -hfr --hf-repo"),
    **same("--max-model-len", "-c --ctx-size --num-ctx --n-ctx --context-length --max-seq-len --max-seq-length", "0"),
    **same("--max-tokens", "-n --predict --n-predict --num-predict --max-new-tokens", "-1", "-2"),
    **same("--threads", "-t", "-1"),
    **same("--max-num-seqs", "-np --parallel", "-1"),
    **same("--max-num-batched-tokens", "-b --batch-size"),
    **same("--seed", "-s", "-1"),
    **same("--temperature", "--temp"),
    **same("--repetition-penalty", "--repeat-penalty"),
    **same("--stop", "-r --reverse-prompt"),
    **same("--prompt-file", "-f --file"),
    **same("--system", "-sys --system-prompt"),
    **same("--hf-token", "-hft"),
    **same("--device", "-dev --gpu"),
    **same("--base-url", "--url"),
    **same("--quantization int4", "--load-in-4bit", takes=0),
    **same("--quantization int8", "--load-in-8bit", takes=0),
    **same("--served-model-name", "-a --alias"),
    **same("--request-timeout", "-to --timeout"),
    **same("--chat-template", "--chat-template-file"),
    **same("--default-chat-template-kwargs", "--chat-template-kwargs"),
    **same("--root-path", "--api-prefix"),
    **same("--allowed-origins", "--cors --cors-origins --cors-allow-origins"),
    **same("--ssl-keyfile", "--ssl-key-file"),
    **same("--ssl-certfile", "--ssl-cert-file"),
    **same("--check-weights", "--check-tensors", takes=0),
    **same("--enable-expert-parallel", "-ep", takes=0),
    **same("--log-json", "--log-jsonl", takes=0),
    **same("--no-log-json", "--no-log-jsonl", takes=0),
    **same("--enable-prefix-caching", "--cache-prompt", takes=0),
    **same("--no-enable-prefix-caching", "--no-cache-prompt", takes=0),
    **same("--no-wrap", "--nowordwrap", takes=0),
    **same("--quantization", "-q"),
    **{name: Foreign(into="", values={"0": "--device cpu", "all": "", "auto": ""}, counts=True) for name in _LAYERS},
    **{
        name: Foreign(why="use --kv-cache-dtype fp8 or int8", values=_KV)
        for name in ("-ctk", "--cache-type-k", "-ctv", "--cache-type-v")
    },
    **{name: Foreign(into="", takes=takes) for takes, names in HARMLESS.items() for name in names.split()},
    **ignored(
        "the system places threads; --threads sets their number",
        "-C --cpu-mask -Cr --cpu-range -Cb --cpu-mask-batch -Crb --cpu-range-batch --cpu-strict --cpu-strict-batch "
        "--numa --prio --prio-batch --poll --poll-batch",
    ),
    **ignored("--threads also applies to prompts", "-tb --threads-batch"),
    **ignored("--max-num-batched-tokens limits a step", "-ub --ubatch-size"),
    **ignored(
        "the K/V cache keeps prefixes by itself; --kv-cache-memory-bytes sets its size",
        "--keep -dt --defrag-thold --cache-reuse -cram --cache-ram -ctxcp --ctx-checkpoints -sps "
        "--slot-prompt-similarity",
    ),
    **ignored("requests to Ollama's API set how long a model stays: keep_alive", "--keepalive --sleep-idle-seconds"),
    **ignored("an idle connection is closed after 60 seconds", "--timeout-keep-alive"),
    **ignored("the system may page memory out", "--mlock", takes=0),
    **ignored("weights are always packed for this machine", "-nr --no-repack", takes=0),
    **ignored("GET /slots shows only how many rows work", "--no-slots", takes=0),
    **ignored("an answer ends where the context does", "--context-shift", takes=0),
    **ignored("set it in requests: skip_special_tokens", "-sp --special", takes=0),
    **ignored("prompts are taken as they are", "-e --escape --verbose-prompt", takes=0),
    **refused(
        "give --enable-lora --lora-modules NAME=FILE, and NAME as the model of requests",
        "--lora --lora-scaled --adapter",
    ),
    **refused("control vectors are not built", "--control-vector --control-vector-scaled"),
    **refused("pictures and sound are not read", "-mm --mmproj -mmu --mmproj-url --image --audio"),
    **refused(
        'give --speculative-config, such as \'{"method": "ngram", "num_speculative_tokens": 4}\'',
        "-md --model-draft --spec-draft-model -hfd --hf-repo-draft --draft --draft-max --draft-n --draft-min "
        "--spec-type --spec-draft-n-max --spec-draft-n-min -ctkd -ctvd -ngld --n-gpu-layers-draft",
    ),
    **refused(
        "weights stay on one device: --quantization makes them smaller",
        "-ot --override-tensor -ncmoe --n-cpu-moe --moe-cache-mib -ncffn --n-cpu-ffn -ts --tensor-split",
    ),
    **refused("weights stay on one device: --quantization makes them smaller", "-cmoe --cpu-moe", takes=0),
    **refused("keys and values stay on the device", "-nkvo --no-kv-offload", takes=0),
    **refused("--tensor-parallel-size N splits every layer over N devices", "-sm --split-mode", "none"),
    **refused("--device cuda:1 names another GPU", "-mg --main-gpu", "0"),
    **refused(
        "give --hf-overrides with the entries of config.json",
        "--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx --yarn-ext-factor "
        "--yarn-attn-factor --yarn-beta-slow --yarn-beta-fast --override-kv",
    ),
    **refused("download the file, and name it", "-mu --model-url -dr --docker-repo -hff --hf-file"),
    **refused("models are loaded from the hub's cache when HF_HUB_OFFLINE=1 is set", "--offline", takes=0),
    **refused("`tokenmill doctor` lists devices", "--list-devices", takes=0),
    **refused("logs go to standard error: redirect that", "--log-file"),
    **refused("use --log-level", "-lv --verbosity --log-verbosity"),
    **refused("use --log-level error", "--log-disable", takes=0),
    **refused("set it in requests: structured_outputs, response_format", "--grammar --grammar-file -j"),
    **refused("set it in requests: structured_outputs, response_format", "--json-schema --json-schema-file -jf"),
    **refused("set it in requests: response_format, or Ollama's format", "--format"),
    **refused(
        _SAMPLERS,
        "--samplers --sampler-seq --sampling-seq --top-nsigma --top-n-sigma --xtc-probability --xtc-threshold "
        "--typical --typical-p --repeat-last-n --presence-penalty --frequency-penalty --dry-multiplier --dry-base "
        "--dry-allowed-length --dry-penalty-last-n --dry-sequence-breaker --dynatemp-range --dynatemp-exp --mirostat "
        "--mirostat-lr --mirostat-ent -l --logit-bias --adaptive-target --adaptive-decay",
    ),
    **refused("give keys with --api-key or TOKENMILL_API_KEY", "--api-key-file"),
    **refused("the page is part of the server", "--no-webui --no-ui", takes=0),
    **refused("the page is part of the server", "--path --webui-config --webui-config-file"),
    **refused("the prefix cache keeps conversations by itself", "--slot-save-path"),
    **refused("the model decides how embeddings are pooled", "--pooling", "none", "mean", "last", "cls"),
    **refused("set it in requests: chat_template_kwargs", "--reasoning-budget", "-1"),
    **refused("--reasoning-parser names the format", "--reasoning-format", "auto", "deepseek", "none"),
    **refused(
        "several models are named on the command line, or in a file: --models FILE", "--models-dir --models-preset"
    ),
    **refused("memory limits how many models are loaded: --models-memory BYTES", "--models-max"),
    **refused("hub names come over TLS", "--insecure", takes=0),
    **refused("set it in requests: think, reasoning_effort", "--think", takes=-1),
    **refused("`chat` drops the oldest turns instead", "--grp-attn-n -gan --grp-attn-w -gaw"),
    **refused("requests ask for beams: use_beam_search, or `LLM.beam_search` in Python", "--num-beams"),
    **refused("one process serves; --engines N starts more engines", "--workers"),
    **refused("templates come from the model, or from --chat-template FILE", "--no-jinja", takes=0),
}
"""llama.cpp's flags, and those of `ollama run`."""

DEFAULTS: Mapping[str, str] = {
    "--temperature": "temperature",
    "--top-p": "top_p",
    "--top-k": "top_k",
    "--min-p": "min_p",
    "--repetition-penalty": "repetition_penalty",
    "--max-tokens": "max_new_tokens",
}
"""Flags for one answer -> their names in generation_config.json."""

VERBS: Mapping[str, str] = {
    "run": "`tokenmill chat MODEL` talks with a model, `generate MODEL -p TEXT` continues a text.",
    "cli": "`tokenmill chat MODEL` talks with a model, `generate MODEL -p TEXT` continues a text.",
    "complete": "`tokenmill generate MODEL -p TEXT` continues a text.",
    "completions": "`tokenmill completion SHELL` prints the script for a shell.",
    "download": "`tokenmill pull OWNER/NAME` downloads a model.",
    "ls": "`tokenmill list` lists the stored models.",
    "push": "Models are files: nothing is uploaded from here.",
    "convert": "`tokenmill quantize SRC DST` writes a smaller model.",
    "server": "`tokenmill serve MODEL` serves a model.",
    "start": "`tokenmill serve MODEL` serves a model.",
    "run-batch": "There are no batch jobs: `LLM.generate` and `LLM.chat` take a list of prompts, and a server "
    "(`tokenmill serve MODEL`) batches whatever is asked at once.",
    "collect-env": "`tokenmill doctor` looks at this machine.",
    "help": "`tokenmill --help` lists the verbs, `tokenmill VERB --help` the flags of one.",
    "version": "`tokenmill --version` prints it.",
    "benchmark": "`tokenmill bench --help` lists what is measured.",
    "embed": "A server has /v1/embeddings: `tokenmill serve MODEL` starts one.",
}
"""Verbs of ollama, vllm and llama.cpp -> how to do the same here."""


@dataclass(frozen=True, slots=True)
class TypedFlag:
    """One flag as it was typed, our name for it, and the value that it has for us. words: with the typed value."""

    typed: str
    ours: str
    value: str
    words: str


def as_ours(args: list[str], known: Mapping[str, bool], verb: str, said: list[TypedFlag] | None = None) -> list[str]:
    """The command line with other programs' flags replaced or left out. known: the verb's flags, and whether a value
    follows each. verb: its name, behind `bench` if it is one of these. said receives every flag that was found. Raises
    Refused for a flag that cannot be used."""
    said = [] if said is None else said
    args = _joined(args, known, verb)
    found: list[str] = []
    at = 0
    while at < len(args):
        word, rest = args[at], args[at + 1 :]
        name, equals, value = word.partition("=")
        typed_name = name
        name = _dashed(name, known, verb)
        at += 1
        if word == "--":
            return [*found, word, *rest]
        if not _is_flag(word):
            found.append(word)
        elif name in known:
            taken = int(known[name] and not equals)
            text = value if equals else " ".join(rest[:taken])
            said.append(TypedFlag(typed_name, name, text, f"{typed_name} {text}".rstrip()))
            same = SAME.get((name.removeprefix("--").replace("-", "_"), text))
            found += [f"{name}{equals}{value}", *rest[:taken]] if same is None else [name, same]
            at += taken
        elif (other := _lookup(name, verb)) is not None:
            given = [value] if equals else rest[: _taken(other, rest)]
            words = _ours(name, other, given, known)
            if other.note and not words and not (given and given[0] in _OFF):
                say(f"note: {typed_name} has no effect: {other.note}.")
            text = " ".join([typed_name, *given])
            said += [TypedFlag(typed_name, ours, " ".join(words[1:]), text) for ours in words[:1]]
            found += words
            at += 0 if equals else len(given)
        elif word[:2] in known and not word.startswith("--"):
            said.append(TypedFlag(name[:2], name[:2], word[2:], word))
            found.append(word)  # -pTEXT
        else:
            raise _elsewhere(name, name, [value] if equals else rest[:1], known)
    return found


def _joined(args: list[str], known: Mapping[str, bool], verb: str) -> list[str]:
    """vLLM's `--flag.key value` as `--flag {"key": value}`, behind other words. `--flag.key+ 1,2` adds to a list."""
    end = args.index("--") if "--" in args else len(args)
    kept: list[str] = []
    parts: dict[str, dict[str, Any]] = {}
    words = iter(args[:end])
    for word in words:
        name, equals, value = word.partition("=")
        part = _PART.fullmatch(name)
        ours = _dashed(name if part is None else part[1], known, verb)
        if part is None or not (ours in known or _lookup(ours, verb) is not None):
            kept.append(word)
            continue
        text = value if equals else next(words, None)
        if text is None:
            raise RefusedFlag(f"{name} needs a value.")
        *outer, key = part[2].split(".")
        inner = parts.setdefault(ours, {})
        for each in outer:
            if not isinstance(inner.get(each), dict):
                inner[each] = {}
            inner = inner[each]
        if key.endswith("+"):
            before = inner.get(key := key[:-1])
            inner[key] = [*(before if isinstance(before, list) else ()), *map(parsed, text.split(","))]
        else:
            inner[key] = parsed(text)
    whole = {_dashed(word.partition("=")[0], known, verb) for word in kept if _is_flag(word)}
    if twice := whole.intersection(parts, known):
        raise RefusedFlag(f"{min(twice)} is given whole and key by key: give it in one of the two ways.")
    return [*kept, *(word for name, given in parts.items() for word in (name, json.dumps(given))), *args[end:]]


def _dashed(name: str, known: Mapping[str, bool], verb: str) -> str:
    """--max_model_len as --max-model-len, as vLLM reads it."""
    dashed = name.replace("_", "-")
    meant = name.startswith("--") and name not in known and _lookup(name, verb) is None
    return dashed if meant and (dashed in known or _lookup(dashed, verb) is not None) else name


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and not (word[1].isdigit() or word[1] == ".")


def _taken(other: Foreign, rest: list[str]) -> int:
    if other.takes >= 0:
        return min(other.takes, len(rest))
    return int(bool(rest) and rest[0] in _CHOICES)


def _lookup(name: str, verb: str) -> Foreign | None:
    if name == "-p" and verb == "serve":
        return Foreign(why="--port N is the port, and requests bring their prompts")
    if verb == "show" and name in _PARTS:
        return Foreign(into=f"--only {name[2:]}", takes=0)
    if name in ("-v", "--verbose", "--log-verbose"):
        return Foreign(into="--log-level debug" if verb == "serve" else "", takes=0)
    return (BENCH.get(name) if verb.startswith("bench ") else None) or LLAMA.get(name) or _vllm(name)


def _vllm(name: str) -> Foreign | None:
    """The meaning of vLLM's flags that are not options here."""
    if name in _SHORT:
        return _vllm(_SHORT[name]) or Foreign(into=_SHORT[name])
    plain = name.removeprefix("--").replace("-", "_")
    if name.startswith("--no-") and plain not in SWITCHES and plain.removeprefix("no_") in SWITCHES:
        return Foreign(into="", takes=0)
    other = ENGINE.get(plain) or SERVER.get(plain)
    if other is None or not name.startswith("--"):
        return None
    if plain in SWITCHES:
        return Foreign(into="", takes=0) if not other.asks(True) else Foreign(why=other.why, takes=0)
    if other.harmless:
        return Foreign(into="")
    return Foreign(why=other.why, values={str(value): "" for value in (*other.neutral, 0, "")})


def _ours(name: str, other: Foreign, given: list[str], known: Mapping[str, bool]) -> list[str]:
    typed_words = " ".join([name, *given])
    if given and (given[0] in other.values or str(parsed(given[0])) in other.values):
        words = other.values.get(given[0], "").split()
    elif other.into is None:
        raise RefusedFlag(f"{typed_words} cannot be used: {other.why}.")
    else:
        if other.takes == 1 and not given and other.into:
            raise RefusedFlag(f"{name} needs a value; here it is called {other.into}.")
        if other.counts and given and not isinstance(parsed(given[0]), int):
            others = " or ".join(word for word in other.values if not word.isdigit())
            raise RefusedFlag(f"{typed_words} cannot be used: it takes a whole number, or {others}.")
        words = [*other.into.split(), *(given if other.into else [])]
    if words and words[0] not in known:
        raise _elsewhere(name, words[0], given, known)
    return words


def _elsewhere(name: str, ours: str, given: list[str], known: Mapping[str, bool]) -> RefusedFlag:
    """A flag that other verbs have."""
    if ours in DEFAULTS and "--override-generation-config" in known:
        value = given[0] if given else "..."
        entry = f'{{"{DEFAULTS[ours]}": {value}}}'
        return RefusedFlag(
            f"Requests say what {name} says here; a default is given as --override-generation-config '{entry}'."
        )
    renamed = "There is no flag {0} here." if name == ours else "There is no flag {0} here; elsewhere it is {1}."
    return RefusedFlag(renamed.format(name, ours), ours)
