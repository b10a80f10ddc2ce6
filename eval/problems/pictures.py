"""The pictures of prepared problems: read as rows hold them, checked, scaled and stored once."""

from __future__ import annotations

import base64
import hashlib
import io
import math
from collections.abc import Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from downloads.urls import read_url
from eval.problems.columns import image_columns
from eval.problems.files import columns_of, iterate_rows
from eval.problems.items import Problem
from eval.problems.rows import Split
from eval.problems.values import Unusable, images_in

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

IMAGES = "images"  # the folder of pictures, named by the sha256 of their content
MAX_BYTES = 64 * 1024**2  # of an encoded picture
LARGE = "a picture of more than 64 MiB"
MILLIONS = 50  # of pixels of a decoded one, each of which takes up to 8 bytes here
MAX_RATIO = 200  # of its sides, as the models' processors allow
_EXTENSIONS = {"PNG": "png", "JPEG": "jpg", "WEBP": "webp"}  # stored as they are
# a data URL, or base64 as pictures begin: JPEG, PNG, WebP, GIF
_BASE64 = ("data:", "/9j/", "iVBORw0KGgo", "UklGR", "R0lGOD")
_ADDRESSES = ("http://", "https://")
_READABLE = (*_EXTENSIONS, "BMP", "GIF", "TIFF")


class PictureStore:
    """The pictures of prepared files in a folder; names are relative to it, with their sha256."""

    def __init__(self, folder: Path, max_pixels: int | None = None) -> None:
        """Pictures with more than `max_pixels` are scaled down to it."""
        self.folder = folder
        self.max_pixels = max_pixels
        self.sizes: dict[str, tuple[int, int]] = {}  # width and height of each stored picture
        self.scaled = set[str]()
        self._names: dict[bytes, str] = {}  # by the digest of what a row holds

    def stored(self, problem: Problem, source: Path | None) -> Problem | Unusable:
        """Return the problem with the names of its pictures; Unusable if one cannot be read.

        `source` is the file or folder of its row. Raises DownloadError if a server of pictures does
        not answer.
        """
        folder = source.parent if source is not None and source.is_file() else source
        try:
            names = tuple(self._add(value, folder) for value in problem.images)
        except Unusable as reason:
            return reason
        return replace(problem, images=names)

    def _add(self, value: Any, folder: Path | None) -> str:
        content = _content(value, folder)
        digest = hashlib.sha256(content).digest()
        if digest not in self._names:
            self._names[digest] = self._store(content)
        return self._names[digest]

    def keep(self, names: Set[str]) -> None:
        """Delete all other pictures."""
        for name in self.sizes.keys() - names:
            (self.folder / name).unlink()
            del self.sizes[name]

    def _store(self, content: bytes) -> str:
        from PIL import Image

        try:
            with Image.open(io.BytesIO(content), formats=_READABLE) as image:
                _require_usable(image)
                given = image.size
                content, extension, size = self._encoded(image, content)
        except Unusable:
            raise
        except Image.DecompressionBombError:
            raise Unusable(f"a picture of more than {MILLIONS} million pixels") from None
        except Exception as error:  # the content may be anything
            raise Unusable(f"a picture that cannot be decoded ({type(error).__name__})") from error
        name = f"{IMAGES}/{hashlib.sha256(content).hexdigest()}.{extension}"
        if name not in self.sizes:
            (self.folder / IMAGES).mkdir(exist_ok=True)
            (self.folder / name).write_bytes(content)
            self.sizes[name] = size
            if math.prod(size) < math.prod(given):
                self.scaled.add(name)
        return name

    def _encoded(self, image: PilImage, content: bytes) -> tuple[bytes, str, tuple[int, int]]:
        """Return the content to store, its extension and its size.

        A picture is encoded again if it is too large or if readers could disagree on it: turned
        by its metadata, transparent, animated, or neither RGB nor grey.
        """
        from PIL import Image, ImageOps

        image.load()
        is_plain = image.mode in ("RGB", "L") and "transparency" not in image.info
        is_plain &= image.getexif().get(0x0112, 1) == 1 and getattr(image, "n_frames", 1) == 1
        num_pixels = image.width * image.height
        is_large = self.max_pixels is not None and num_pixels > self.max_pixels
        if is_plain and not is_large and image.format in _EXTENSIONS:
            return content, _EXTENSIONS[image.format], image.size
        drawn = ImageOps.exif_transpose(image).convert("RGBA")
        plain = Image.new("RGBA", drawn.size, "white")
        plain.alpha_composite(drawn)
        picture = plain.convert("RGB")
        if is_large:
            assert self.max_pixels is not None
            scale = (self.max_pixels / num_pixels) ** 0.5
            size = [max(1, int(side * scale)) for side in picture.size]
            picture = picture.resize(size, Image.Resampling.LANCZOS)
        encoded = io.BytesIO()
        picture.save(encoded, "PNG")
        return encoded.getvalue(), "png", picture.size


def is_remote(value: Any) -> bool:
    """True if a row names its picture by a web address."""
    if isinstance(value, Mapping):
        value = value.get("path") if value.get("bytes") is None else None
    return isinstance(value, str) and value.startswith(_ADDRESSES)


def _require_usable(image: PilImage) -> None:
    """Raise Unusable, by the header alone, for a picture that is not decoded."""
    width, height = image.size
    shown = f"a picture of {width} x {height} pixels"
    if width * height > MILLIONS * 10**6:
        raise Unusable(f"{shown}, more than {MILLIONS} million")
    if max(image.size) > MAX_RATIO * min(image.size):
        raise Unusable(f"{shown}, whose sides differ by more than {MAX_RATIO} to 1")
    if image.mode.startswith(("I", "F")):
        raise Unusable("a picture with more than 8 bits a channel")


def _content(value: Any, folder: Path | None) -> bytes:
    """Return the bytes of a picture: given, in base64, on a server, or in a file."""
    if isinstance(value, Mapping):
        held = value.get("bytes")
        value = value.get("path") if held is None else held
    if isinstance(value, bytes):
        content = value
    elif not isinstance(value, str):
        raise Unusable(f"a value of type {type(value).__name__} as a picture")
    elif value.startswith(_BASE64):
        head, comma, data = value.rpartition(",")
        if comma and not head.endswith(";base64"):
            raise Unusable("a data URL that is not base64 as a picture")
        try:
            content = base64.b64decode(data, validate=True)
        except ValueError:
            raise Unusable("a text that is not base64 as a picture") from None
    elif value.startswith(_ADDRESSES):
        content = read_url(value, MAX_BYTES)
    else:
        content = _read(value, folder)
    if not content:
        raise Unusable("a picture without content")
    if len(content) > MAX_BYTES:
        raise Unusable(LARGE)
    return content


def _read(name: str, folder: Path | None) -> bytes:
    """Return a file's content. A row may name files beside its own file, and no others."""
    if folder is None:
        raise Unusable("a picture file, although the rows are generated")
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise Unusable("a picture outside of the folder of its file: move it there")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise Unusable(LARGE)
        return path.read_bytes()
    except (OSError, ValueError):
        raise Unusable("a picture file that is not beside the file of its row") from None


def picture_files(path: Path, split: Split) -> list[Path]:
    """The existing files of pictures that the rows of a local set name."""
    folder, found = path if path.is_dir() else path.parent, dict[Path, None]()
    columns = image_columns(columns_of(path, split))
    for row in iterate_rows(path, split=split) if columns else ():
        for value in images_in(row, columns):
            name = value.get("path") if isinstance(value, Mapping) else value
            is_held = isinstance(value, Mapping) and value.get("bytes") is not None
            if is_held or not isinstance(name, str) or name.startswith(_BASE64):
                return []  # the rows hold their pictures
            if not name.startswith(_ADDRESSES):
                found[folder / name] = None
    return [file for file in found if file.is_file()]
