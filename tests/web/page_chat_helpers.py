"""What test_page_chat.py and other tests share."""

from __future__ import annotations

import json
from typing import Any

STORY = """The **mill** stands by the river. It has [two wheels](https://example.org/wheels) and:

1. a roof,
2. a door:
   - of oak

```python
def grind(grain: str) -> str:  # slowly
    return grain.lower()
```

| Wheel | Turns |
|---|--:|
| left | 12 |

Danger: <img src=x onerror="document.title='owned'"> [click](javascript:document.title='owned') ![far](https://far.example/x.png)
"""


def say(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def ended(page: Any, number: int = 1) -> None:
    """Wait for so many answers with figures."""
    page.wait_for_function("n => document.querySelectorAll('.answer .figures').length >= n", arg=number)


def bodies(page: Any) -> list[dict[str, Any]]:
    """Chat requests of the page from now on."""
    found: list[dict[str, Any]] = []

    def note(request: Any) -> None:
        if request.url.endswith("/v1/chat/completions"):
            found.append(json.loads(request.post_data))

    page.on("request", note)
    return found


def _events(*deltas: dict[str, Any], finish: str = "stop") -> str:
    chunks: list[dict[str, Any]] = [{"id": "chatcmpl-1", "choices": [{"index": 0, "delta": d}]} for d in deltas]
    chunks.append({"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    return "".join(f"data: {json.dumps(c)}\n\n" for c in chunks) + "data: [DONE]\n\n"
