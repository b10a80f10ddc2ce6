"""Values as lists and dicts, which compare by content where dataclasses hold arrays."""

from dataclasses import is_dataclass
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """Return dataclasses as dicts of their fields, and sequences and arrays as lists."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if is_dataclass(value):
        return {name: plain(each) for name, each in vars(value).items()}
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value
