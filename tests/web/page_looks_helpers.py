"""What test_page_looks.py and other tests share."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.web.conftest import SHOTS

AXE = Path(os.environ.get("TOKENMILL_AXE", str(SHOTS.parent / "axe" / "package" / "axe.min.js")))


def check_axe(page: Any, where: str) -> None:
    page.evaluate(AXE.read_text())
    found = page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
    bad = [
        (
            where,
            fault["id"],
            fault["impact"],
            [(n["html"][:140], n["failureSummary"][:200]) for n in fault["nodes"][:3]],
        )
        for fault in found["violations"]
        if fault["impact"] in ("serious", "critical", "moderate")
    ]
    assert not bad, json.dumps(bad, indent=1)
