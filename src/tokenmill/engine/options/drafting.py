"""Which drafter a configuration asks for. Owns: reading --speculative-config, and where drafts are made.

Names are vLLM's. What has no effect here is refused by name. Must not know: models' files, tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from tokenmill.core.config import EngineConfig, SpeculateOptions
from tokenmill.core.drafting import DraftControl, HostDrafter
from tokenmill.core.errors import ParameterError, shown
from tokenmill.engine.options.draft_settings import ENTRIES, NOT_BUILT, SAME_AS
from tokenmill.speculate.control import Control, TreeControl
from tokenmill.speculate.ngram import NgramDrafter
from tokenmill.speculate.none import NoDrafter
from tokenmill.speculate.patience import Careful, HostControl
from tokenmill.speculate.shapes import MOST_NODES, TreeShape, Windows, read_shape
from tokenmill.speculate.suffix import SuffixDrafter

MAX_DRAFTS = 16
COMMON = ("method", "num_speculative_tokens", "disable_by_batch_size")
METHODS: dict[str, tuple[str, ...]] = {
    "ngram": ("prompt_lookup_max", "prompt_lookup_min"),
    "suffix": ("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests"),
    "draft_model": ("model", "quantization", "revision", "enforce_eager"),
    "medusa": ("model", "quantization", "revision", "enforce_eager", "speculative_token_tree"),
    "eagle": ("model", "quantization", "revision", "enforce_eager", "speculative_token_tree"),
    "eagle3": ("model", "quantization", "revision", "enforce_eager", "speculative_token_tree"),
    "mtp": ("enforce_eager", "speculative_token_tree"),
    "lookahead": ("lookahead_window", "lookahead_ngram", "lookahead_candidates"),
}
"""Methods with their own settings, besides the common ones."""


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of --speculative-config."""

    method: str
    most: int = 4
    most_rows: int | None = None
    """With more rows there are no drafts; None: the control decides."""
    longest: int = 4
    shortest: int = 2
    depth: int = 24
    kept: int = 10_000
    model: str | None = None
    quantization: str | None = None
    revision: str | None = None
    eager: bool | None = None
    """True: the drafter's work is not recorded; None: as for the model."""
    tree: TreeShape | None = None
    """The shape of draft trees; None: drafts are chains."""
    windows: Windows | None = None
    """Given if the tree is that of Jacobi windows."""


def read_speculation(options: SpeculateOptions) -> Speculation | None:
    """None: no drafts."""
    spec = options.speculative_config
    if spec is None or spec == {}:
        return None
    if not isinstance(spec, dict):
        raise _refuse('it must be an object, like {"method": "ngram"}')
    spec, method = _ours(spec)
    known = {*COMMON, *METHODS[method]}
    if extra := sorted(set(spec) - known):
        raise _refuse(
            f"entries without meaning for {method!r} ({', '.join(extra)}); known are {', '.join(sorted(known))}"
        )
    model = spec.get("model")
    if "model" in METHODS[method] and (not isinstance(model, str) or not model):
        raise _refuse(f'{method!r} needs "model", a folder, a file or a name as --model has it')
    if not isinstance(eager := spec.get("enforce_eager"), bool | None):
        raise _refuse("enforce_eager must be true or false")
    tree = _tree(spec, method) if "speculative_token_tree" in spec else None
    windows = _windows(spec)
    longest, shortest = _lengths(spec)
    tree = tree if windows is None else TreeShape(windows.nodes)
    return Speculation(
        method=method,
        most=_count(spec, "num_speculative_tokens", 4, 1, MAX_DRAFTS) if tree is None else tree.nodes,
        most_rows=_count(spec, "disable_by_batch_size", 1, 1, 1 << 20) if "disable_by_batch_size" in spec else None,
        longest=longest,
        shortest=shortest,
        depth=_count(spec, "suffix_decoding_max_tree_depth", 24, 2, 64),
        kept=_count(spec, "suffix_decoding_max_cached_requests", 10_000, 0, 1 << 20),
        model=model,
        quantization=_word(spec, "quantization"),
        revision=_word(spec, "revision"),
        eager=eager,
        tree=tree,
        windows=windows,
    )


def _ours(spec: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The entries that ask for something, and the method by our name for it."""
    every = {*COMMON, *(name for names in METHODS.values() for name in names)}
    if unknown := sorted(map(str, set(spec) - every - set(ENTRIES))):
        raise _refuse(f"unknown entries ({', '.join(unknown)}); known are {', '.join(sorted(every))}")
    for name, entry in ENTRIES.items():
        if entry.asks(spec.get(name)):
            raise _refuse(f"{name}: {entry.why}")
    spec = {name: value for name, value in spec.items() if value is not None and name not in ENTRIES}
    method = spec.get("method")
    if spec.get("model") in ("ngram", "[ngram]") and method in (None, "ngram"):  # vLLM's older spelling
        method = "ngram"
        del spec["model"]
    if isinstance(method, str):
        if method in NOT_BUILT:
            raise _refuse(f"method {method!r} is not available: {NOT_BUILT[method]}")
        method = SAME_AS.get(method, method)
    if method is None and "model" in spec:
        method = "draft_model"
    if not isinstance(method, str) or method not in METHODS:
        raise _refuse(f"method {shown(method)} is not available; use one of {', '.join(map(repr, METHODS))}")
    return spec, method


def _lengths(spec: dict[str, Any]) -> tuple[Any, Any]:
    """The longest and the shortest n-gram, which drafters check. If only one is given, the other's default follows
    it."""
    longest, shortest = spec.get("prompt_lookup_max", 4), spec.get("prompt_lookup_min", 2)
    if "prompt_lookup_min" not in spec and type(longest) is int and longest > 0:
        shortest = min(longest, shortest)
    if "prompt_lookup_max" not in spec and type(shortest) is int:
        longest = max(longest, shortest)
    return longest, shortest


OF_HOST: dict[str, Callable[[Speculation], HostDrafter]] = {
    "ngram": lambda found: NgramDrafter(found.longest, found.shortest),
    "suffix": lambda found: SuffixDrafter(found.depth, found.kept),
}
"""Methods whose drafters work on the host, and how each is made; all others are loaded onto the device."""


def host_drafter(found: Speculation | None) -> tuple[HostDrafter, int]:
    """The host's drafter, and how many tokens it may guess."""
    if found is None or found.method not in OF_HOST:
        return NoDrafter(), 0
    return OF_HOST[found.method](found), found.most


def looks_on_device(config: EngineConfig, found: Speculation, device: str) -> bool:
    """Are n-grams looked up on the device? Yes on a GPU, and on a CPU if a user asks for several plans in flight,
    because drafts of the host wait for the commit. (With one plan in flight the host's index is faster than a search.
    Sequences in which the host takes part, such as those with grammars, always get the host's drafts.)"""
    if found.method != "ngram" or config.parallel.pipeline_parallel_size > 1:  # drafts have to reach the first stage
        return False
    return device != "cpu" or (config.execute.pipeline_depth or 1) > 1


def reads_words(found: Speculation | None) -> bool:
    """Does the drafter read the target's embeddings? Then the last stage needs them, too."""
    return found is not None and found.method in ("eagle", "eagle3", "mtp")


def control_of(found: Speculation | None, step_guesses: int, *, on_device: bool) -> DraftControl | None:
    """The control of how many drafts are made; None: there are no drafts."""
    if found is None:
        return None
    if on_device and found.tree is not None:
        return TreeControl(found.most, found.most_rows, step_guesses)
    return Control(found.most, found.most_rows, step_guesses) if on_device else HostControl(found.most_rows)


def with_care(drafter: HostDrafter, found: Speculation | None, control: DraftControl | None) -> HostDrafter:
    """The host's drafter, limited to as many guesses as pay off."""
    if found is None or found.method not in OF_HOST:
        return drafter
    return Careful(drafter, control if isinstance(control, HostControl) else HostControl(found.most_rows))


def _count(spec: dict[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = spec.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ParameterError(f"{name} must be an integer in [{low}, {high}].", param="speculative_config")
    return value


def _tree(spec: dict[str, Any], method: str) -> TreeShape:
    if method != "medusa" and spec["speculative_token_tree"] != "best":
        raise _refuse(f'speculative_token_tree: {method!r} makes the likeliest nodes: "best", and no list of paths')
    nodes = _count(spec, "num_speculative_tokens", 1, 1, MOST_NODES) if "num_speculative_tokens" in spec else None
    try:
        return read_shape(spec["speculative_token_tree"], nodes)
    except ValueError as error:
        raise _refuse(f"speculative_token_tree: {error}") from None


def _windows(spec: dict[str, Any]) -> Windows | None:
    """None: Lookahead without windows, or another method."""
    if "lookahead_window" not in spec:
        if alone := [name for name in METHODS["lookahead"] if name in spec]:
            raise _refuse(
                f'{", ".join(alone)} without "lookahead_window" has no meaning: without windows drafts are chains'
            )
        return None
    found = Windows(
        _count(spec, "lookahead_window", 8, 1, MOST_NODES),
        _count(spec, "lookahead_ngram", 6, 2, MAX_DRAFTS),
        _count(spec, "lookahead_candidates", 4, 1, MOST_NODES),
    )
    if found.nodes > MOST_NODES:
        raise _refuse(
            f"lookahead_window {found.window} and lookahead_candidates {found.candidates} with lookahead_ngram "
            f"{found.length} are {found.nodes} nodes, more than {MOST_NODES}"
        )
    if found.levels > MAX_DRAFTS:
        raise _refuse(f"lookahead_window + lookahead_ngram may be {MAX_DRAFTS + 2} at most: a tree is so deep")
    if spec.get("num_speculative_tokens") not in (None, found.nodes):
        raise _refuse(
            f"num_speculative_tokens is {shown(spec['num_speculative_tokens'])}, and there are {found.nodes} nodes"
        )
    return found


def _word(spec: dict[str, Any], name: str) -> str | None:
    value = spec.get(name)
    if value is not None and (not isinstance(value, str) or not value):
        raise _refuse(f"{name} must be a word")
    return value


def _refuse(why: str) -> ParameterError:
    return ParameterError(f"speculative_config: {why}.", param="speculative_config")
