"""Suggestions for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

MAX_SHOWN = 8


def nearest(name: str, names: Sequence[str]) -> str:
    """` (did you mean X?)` for close names, else a list of the names; "" if there are none."""
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if close:
        return f" (did you mean {', '.join(close)}?)"
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return f"; it has {', '.join(names[:MAX_SHOWN])}{more}" if names else ""
