"""What speculation's dashboard asks for adds up, with a real engine that drafts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from tests.cpu.server.conftest import Running

DRAFTS = json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1})


def test_drafts_by_place(launch: Callable[..., Running]) -> None:
    running = launch("--engines", "0", "--speculative-config", DRAFTS)
    body = {"prompt": [7, 8, 9] * 30, "max_tokens": 80, "ignore_eos": True, "temperature": 0.0}
    answer = running.post("/v1/completions", body)
    assert answer.status_code == 200
    drafts, drafted, accepted = (
        running.metric(f"vllm:spec_decode_num_{name}_total") for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    text = running.get("/metrics").text
    places = re.findall(r'^vllm:spec_decode_num_accepted_tokens_per_pos_total{.*position="(\d)"} (.*)$', text, re.M)
    counts = [float(count) for _, count in sorted(places)]
    assert 0 < drafts <= drafted <= 3 * drafts and len(counts) <= 3
    assert sum(counts) == accepted and counts == sorted(counts, reverse=True) and counts[0] <= drafts

    # What a lone request was saved is what the engine was: steps that were not needed, less what drafts took.
    details = answer.json()["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == accepted
    saved, spent = (running.metric(f"tokenmill:draft_{name}_seconds_total") for name in ("saved", "spent"))
    assert saved > 0 and spent >= 0 and abs(details["prediction_saved_ms"] - 1e3 * (saved - spent)) < 0.01
    (prompt,) = running.get("/v1/requests").json()["data"][0]["prompts"]
    assert prompt["drafts"] == {"tried": drafted, "right": accepted, "saved_ms": details["prediction_saved_ms"]}
