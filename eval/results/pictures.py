"""The pictures of an evaluation, kept in the folder `images` of its results."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from pathlib import Path

from durable import link_or_copy
from eval import InputError
from eval.problems.items import Item
from eval.problems.pictures import IMAGES

_TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".webp": "image/webp"}


def keep_pictures(items: Iterable[Item], folder: Path) -> None:
    """Link or copy the pictures of the items into the results folder.

    Raises InputError if some are missing, or differ from the digest in their name.
    """
    files = {file.name: file for item in items for file in item.images}
    faulty = [file for file in files.values() if not _is_intact(file)]
    if faulty:
        raise InputError(
            f"{len(faulty)} of {len(files)} pictures of the evaluation set are missing or damaged "
            f"(first: {faulty[0]}); prepare the set again"
        )
    if files:
        (folder / IMAGES).mkdir(exist_ok=True)
    for name, file in files.items():
        if not (folder / IMAGES / name).exists():
            link_or_copy(file, folder / IMAGES / name)


def _is_intact(file: Path) -> bool:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest() == file.stem
    except OSError:
        return False


def data_url(file: Path) -> str:
    """Return a picture as a URL that holds its content."""
    content = base64.b64encode(file.read_bytes()).decode()
    return f"data:{_TYPES[file.suffix]};base64,{content}"
