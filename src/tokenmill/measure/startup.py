"""`bench startup`: from starting a process to the first token. Owns: the child process and its time stamps.

Run as a module, it is that child. It prints one JSON line: the seconds since it was started, for each stage.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from tokenmill.core.config import make_config
from tokenmill.core.errors import UserError
from tokenmill.engine.load.loading import find_model
from tokenmill.measure.result_files import STOPPED
from tokenmill.measure.stats import summary_ms
from tokenmill.process.start import PYTHON

STAGES = {
    "imported": "modules imported",
    "loaded": "model loaded",
    "first_token": "first token",
    "second_request": "token of a second one",
}
_MOST_SECONDS = 3600


def startup(options: Mapping[str, Any], *, repeat: int = 3, prompt_tokens: int = 16) -> dict[str, Any]:
    """Start `repeat` fresh processes, one after the other. Returns the seconds to each stage, with the median run at
    the top. After Ctrl-C the result holds the runs that had ended."""
    find_model(make_config(**options))  # a missing model is reported at once
    runs: list[dict[str, float]] = []
    try:
        while len(runs) < repeat:
            runs.append(_child(options, prompt_tokens))
    except KeyboardInterrupt:
        if not runs:
            raise
    middle = sorted(runs, key=lambda run: run["first_token"])[len(runs) // 2]
    return {
        "bench": "startup",
        "model": options.get("model"),
        "startup_s": middle["first_token"],
        "stages_s": {stage: middle[stage] for stage in STAGES},
        "first_token_ms": summary_ms([run["first_token"] for run in runs]),
        "runs": runs,
        **({STOPPED: True} if len(runs) < repeat else {}),
    }


def _child(options: Mapping[str, Any], prompt_tokens: int) -> dict[str, float]:
    asked = json.dumps({"options": dict(options), "prompt_tokens": prompt_tokens, "at": time.time()})
    command = [*PYTHON, "-m", "tokenmill.measure.startup"]
    try:
        done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=_MOST_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"No first token within {_MOST_SECONDS} seconds.") from error
    if done.returncode:
        raise UserError(f"The engine did not start: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _main(asked: str) -> None:
    """The child process: import, load, one token, and one more token."""
    request = json.loads(asked)
    from tokenmill.core.config import calm_threads

    calm_threads()
    from tokenmill.core.request import SamplingParams
    from tokenmill.engine.interfaces.llm import LLM

    stamps = {"imported": time.time()}
    with LLM(**request["options"]) as llm:
        stamps["loaded"] = time.time()
        vocab = llm.built.facts.vocab_size
        prompt = [7 * i % vocab for i in range(1, request["prompt_tokens"] + 1)]
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        for name in ("first_token", "second_request"):
            llm.generate([prompt], params, use_tqdm=False)
            stamps[name] = time.time()
    sys.stdout.write(json.dumps({name: round(at - request["at"], 4) for name, at in stamps.items()}) + "\n")


if __name__ == "__main__":
    _main(sys.stdin.read())
