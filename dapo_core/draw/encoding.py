"""Renders problems with a model's chat template, and tokenizes them with their pictures."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dapo_core.errors import DataError
from dapo_core.model.inputs import ImageReference
from dapo_core.model.pictures import ImageProcessor, require_reads_pictures
from eval.problems.prompts import with_parts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from eval.problems.items import Problem

NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})  # for a chat template


class Tokens(NamedTuple):
    """The tokens of several prompts."""

    ids: np.ndarray  # concatenated
    lengths: np.ndarray  # of each prompt
    images: list[tuple[ImageReference, ...]]  # of each prompt


class PromptEncoder:
    """Renders problems with a model's chat template, and tokenizes them with their pictures."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        model_path: Path,
        folder: Path,
        template_kwargs: Mapping[str, Any] = NO_ARGUMENTS,
    ) -> None:
        """Names of pictures are relative to `folder`."""
        self.tokenizer = tokenizer
        self.model_path = model_path
        self.folder = folder.absolute()  # processes of a training may run elsewhere
        self.template_kwargs = template_kwargs

    @cached_property
    def processor(self) -> ImageProcessor:
        """The model's image processor. Raises ModelError for a model that reads no pictures."""
        return ImageProcessor(self.model_path)

    def render(self, problems: Sequence[Problem]) -> list[str]:
        """Render prompts as text. Raises DataError if the chat template rejects one."""
        from jinja2 import TemplateError

        chats: list[list[Any]] = [list(map(dict, problem.messages or ())) for problem in problems]
        if any(problem.images for problem in problems):
            require_reads_pictures(self.model_path)  # a template for texts would render parts
            chats = [
                with_parts(chat) if problem.images else chat
                for chat, problem in zip(chats, problems, strict=True)
            ]
        try:
            render: Any = self.tokenizer.apply_chat_template
            return render(chats, add_generation_prompt=True, tokenize=False, **self.template_kwargs)
        except TemplateError as error:
            roles = sorted({" ".join(message["role"] for message in chat) for chat in chats})
            raise DataError(
                f"the model's chat template rejects messages with these roles "
                f"({'; '.join(roles)}): {error}. Change the prompts or data.system_prompt, or set "
                "model.chat_template to a template that accepts them"
            ) from None

    def encode(self, problems: Sequence[Problem], texts: list[str]) -> Tokens:
        """Tokenize rendered prompts. Raises DataError for pictures that cannot be used."""
        rows = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False)
        pairs = [self._with_pictures(*pair) for pair in zip(problems, rows.input_ids, strict=True)]
        ids = [row for row, _ in pairs]
        lengths = np.array([len(row) for row in ids], np.int32)
        flat = np.fromiter(itertools.chain.from_iterable(ids), np.int32)
        return Tokens(flat, lengths, [images for _, images in pairs])

    def _with_pictures(
        self, problem: Problem, ids: list[int]
    ) -> tuple[list[int], tuple[ImageReference, ...]]:
        """Replace each picture's one token by all of its tokens."""
        if not problem.images:
            return ids, ()
        processor = self.processor
        places = [place for place, token in enumerate(ids) if token == processor.token_id]
        if len(places) != len(problem.images):
            raise DataError(
                f"the chat template renders {len(places)} of the {len(problem.images)} pictures of "
                f"problem {problem.id}; use the model's own template, or set model.chat_template "
                "to one that accepts {type: image} in a message"
            )
        images, expanded, end = list[ImageReference](), list[int](), 0
        for place, name in zip(places, problem.images, strict=True):
            path = self.folder / name
            grid = processor.grid(path)
            count = processor.num_tokens(grid)
            expanded += ids[end:place]
            images.append(ImageReference(str(path), grid, len(expanded), count))
            expanded += [processor.token_id] * count
            end = place + 1
        return [*expanded, *ids[end:]], tuple(images)
