"""What a model reads before its response: tokens, and references to pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ImageReference:
    """A picture of a prompt. Its pixels stay in its file until an engine or a rank reads them.

    Example, with 4 x 6 patches and 2 x 2 patches a token:
    ImageReference("data/images/9fc1.png", (1, 4, 6), first=3, num_tokens=6)
    """

    path: str  # named by the digest of the file's content
    grid_thw: tuple[int, int, int]  # patches in time, height and width
    first: int  # index of its first token in the prompt
    num_tokens: int

    @property
    def digest(self) -> str:
        return Path(self.path).stem

    @property
    def tokens(self) -> slice:
        """Its tokens in the prompt."""
        return slice(self.first, self.first + self.num_tokens)


@dataclass(frozen=True)
class ModelInput:
    """A tokenized prompt as engines and the policy read it, on its way from request to batch.

    Example: ModelInput((1, 52, 9))
    """

    token_ids: tuple[int, ...]  # every token of a picture included
    images: tuple[ImageReference, ...] = ()

    @property
    def placeholder_ids(self) -> list[int]:
        """The tokens with one for each picture, as vLLM takes them."""
        ids, end = list[int](), 0
        for image in self.images:
            ids += self.token_ids[end : image.first + 1]
            end = image.tokens.stop
        return [*ids, *self.token_ids[end:]]


def rope_positions(num_tokens: int, images: Sequence[ImageReference]) -> NDArray[np.int64]:
    """Return the positions of a prompt and its response in time, height and width: [3, n].

    A picture's tokens are at the places of its grid. Text continues after its longer side, as in
    get_rope_index of Qwen2.5-VL and Qwen3-VL.
    """
    positions = np.tile(np.arange(num_tokens), (3, 1))
    for image in images:
        time, height, width = image.grid_thw
        merge = round((time * height * width / image.num_tokens) ** 0.5)
        sides = time, height // merge, width // merge
        start, end = positions[0, image.first], image.tokens.stop
        positions[:, image.tokens] = start + np.indices(sides).reshape(3, -1)
        positions[:, end:] = start + max(sides) + np.arange(num_tokens - end)
    return positions
