"""Pictures as a model reads them: their size in tokens, and their pixels.

Pillow resizes them for trainer and engines alike: torchvision differs by 0.03 in pixel values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dapo_core.errors import DataError, ModelError
from dapo_core.model.folder import IMAGE_TOKEN, read_config
from dapo_core.model.inputs import ImageReference
from dapo_core.model.pretrained import model_errors

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image


def require_reads_pictures(model_path: str | Path) -> int:
    """Return the model's token of a picture; raises ModelError if it reads none."""
    config = read_config(Path(model_path))
    if IMAGE_TOKEN not in config:
        raise ModelError(
            f"the problems have pictures, but the model in {model_path} reads none (model_type "
            f"{config.get('model_type')}); use a vision-language model such as Qwen2.5-VL or "
            "Qwen3-VL (model.source=recipe: set model.recipe.vision_size), or a set of texts"
        )
    return int(config[IMAGE_TOKEN])


class ImageProcessor:
    """The image processor of a model folder, without torchvision."""

    def __init__(self, model_path: str | Path) -> None:
        """Raises ModelError if the model reads no pictures."""
        from transformers import Qwen2VLImageProcessorPil

        self.token_id = require_reads_pictures(model_path)  # stands for each token of a picture
        with model_errors(model_path, "has no readable image processor"):
            self._processor = Qwen2VLImageProcessorPil.from_pretrained(
                str(model_path), local_files_only=True
            )

    def grid(self, path: str | Path) -> tuple[int, int, int]:
        """Return the patches of a picture in time, height and width, from its header.

        Raises DataError for a picture that cannot be read.
        """
        from PIL import Image

        with _readable(path), Image.open(path) as image:
            width, height = self._size(image)
        side = self._processor.patch_size
        return 1, height // side, width // side

    def num_tokens(self, grid_thw: tuple[int, int, int]) -> int:
        """Return the tokens of a picture."""
        time, height, width = grid_thw
        return time * height * width // self._processor.merge_size**2

    def load(self, path: str | Path) -> Image:
        """Return a picture in the size in which the model reads it. Raises DataError."""
        from PIL import Image

        with _readable(path), Image.open(path) as image:
            size, filter_ = self._size(image), Image.Resampling(self._processor.resample)
            return image.convert("RGB").resize(size, filter_)

    def pixels(self, images: Sequence[ImageReference]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the patches of all images [sum of patches, values], and their grids [images, 3].

        Raises DataError if a picture cannot be read, or differs from its reference.
        """
        pictures = [self.load(image.path) for image in images]
        values = self._processor(pictures, do_resize=False, return_tensors="pt")
        grids = values["image_grid_thw"]
        for image, grid in zip(images, grids.tolist(), strict=True):
            if tuple(grid) != image.grid_thw:
                raise DataError(
                    f"the picture {image.path} has {grid} patches, but had {image.grid_thw} when "
                    "its prompt was tokenized; restore the file"
                )
        return values["pixel_values"], grids

    def _size(self, image: Image) -> tuple[int, int]:
        """Return the width and height of a picture for the model."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        width, height = image.size
        size = self._processor.size
        factor = self._processor.patch_size * self._processor.merge_size
        limits = size["shortest_edge"], size["longest_edge"]
        height, width = smart_resize(height, width, factor, *limits)
        return width, height


@contextmanager
def _readable(path: str | Path) -> Iterator[None]:
    """Turn errors of reading a picture into a DataError."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise DataError(
            f"the picture {path} cannot be read ({error}); restore it, or prepare the data again"
        ) from error
