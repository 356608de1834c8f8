"""JSON inside a page."""

import json
from typing import Any


def page_json(data: Any) -> str:
    """JSON that no text inside it can break out of a script element with; characters stay as they are, in few bytes."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")


def num_bytes(data: Any) -> int:
    """What it takes on a page: as UTF-8, in which half a surrogate pair becomes a question mark."""
    return len(page_json(data).encode("utf-8", "replace"))
