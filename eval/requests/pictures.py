"""Pictures in chat requests, as data URLs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.problems.prompts import IMAGE, Message, with_parts
from eval.results.pictures import data_url


def with_pictures(messages: Sequence[Message], files: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the messages with the contents of these files, in order, in place of `<image>`.

    Messages without pictures keep their content as text.
    """
    if not files:
        return [*messages]
    found, sent = iter(files), list[dict[str, Any]]()
    for message in messages:
        if IMAGE not in message["content"]:
            sent.append({**message})
            continue
        [parted] = with_parts([message])
        parts = [
            {"type": "image_url", "image_url": {"url": data_url(next(found))}}
            if part["type"] == "image"
            else part
            for part in parted["content"]
        ]
        sent.append({**message, "content": parts})
    return sent
