"""HTML by small functions: everything that comes from a run is escaped here, once."""

from __future__ import annotations

import html
import json
from typing import Any


def esc(text: object) -> str:
    return html.escape(str(text), quote=True)


def tag(name: str, *content: str, **attributes: object) -> str:
    """`<name …>content</name>`; content is markup, attributes are text. `class_` is class, `_` is `-`."""
    named = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{esc(value)}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return f"<{name}{named}>{''.join(content)}</{name}>"


def text(name: str, content: object, **attributes: object) -> str:
    """An element that holds plain text."""
    return tag(name, esc(content), **attributes)


def data(value: Any, **attributes: object) -> str:
    """JSON for the page's own script; `</` cannot end the element early."""
    body = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return tag("script", body.replace("<", "\\u003c"), type="application/json", **attributes)


def short(value: float | None) -> float | int | None:
    """Seven significant digits, as few characters as they need; the page shows four of them."""
    if value is None:
        return None
    rounded = float(f"{value:.7g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e6 else rounded
