"""Reads servers' replies to completion requests, with fields missing, null or of other types."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NamedTuple

from durable import parse_json
from redaction import redact

_THINKING = ("reasoning", "reasoning_content", "reasoning_text", "thinking", "reasoning_details")
_TEXTS = ("text", "content", "value", "refusal")  # of a part
_MAX_COUNT = 2**53
_MAX_SHOWN_CHARS = 300


class Answer(NamedTuple):
    """A response of the model."""

    text: str
    finish_reason: str | None
    response_tokens: int | None  # including thinking; None if the server does not count them
    reasoning: str | None = None  # thinking that the server's parser separated from the text
    reasoning_tokens: int | None = None
    details: dict[str, Any] | None = None  # {options, log_probs} if options were ranked


class ReplyError(ValueError):
    """A reply holds no answer. `status` is the HTTP status that its error names, else 200."""

    def __init__(self, reason: str, status: int = HTTPStatus.OK) -> None:
        super().__init__(reason)
        self.status = status


def read_answer(content: bytes, clean: Callable[[str], str] = str) -> Answer:
    """Return the answer in the body of a reply, its texts passed through `clean`.

    Raises ReplyError.
    """
    try:
        payload = _parse(content)
        choice = _choices(payload, content)[0]
        message = choice.get("message")
        fields = message if isinstance(message, dict) else choice
        given = (_thinking_of(fields[name]) for name in _THINKING if fields.get(name))
        thinking = next(filter(None, given), "")
        text = _content_of(fields, choice, bool(thinking))
        answer, thoughts = read_content(text)
    except RecursionError:
        raise ReplyError("the reply is nested too deeply") from None
    reason = choice.get("finish_reason")
    if isinstance(reason, dict):  # SGLang's own form
        reason = reason.get("type")
    usage = payload.get("usage")
    num_thinking = read_count(usage, "reasoning_tokens")
    if num_thinking == 0 and (thinking or thoughts):  # vLLM, if the chat template opens them
        num_thinking = None
    return Answer(
        clean(answer),
        clean(str(reason)) if type(reason) in (str, int) else None,
        read_count(usage, "completion_tokens"),
        clean(thinking or thoughts) or None,
        num_thinking,
    )


def read_echoed(content: bytes, num_prompts: int) -> list[list[float]]:
    """Return the log-probs of each prompt's tokens, 0 for the first. Raises ReplyError."""
    choices = _choices(_parse(content), content)
    try:
        choices.sort(key=lambda choice: choice.get("index") or 0)
        # the last token is generated
        values = [choice["logprobs"]["token_logprobs"][:-1] for choice in choices]
        echoed = [[float(value) for value in (0.0, *one[1:])] for one in values]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        echoed = []
    is_whole = len(echoed) == num_prompts and all(
        len(one) > len(echoed[0]) and all(map(math.isfinite, one)) for one in echoed[1:]
    )
    if not is_whole:
        raise ReplyError(
            "the server returns no log-probs of prompts (completions with echo and logprobs), "
            "which evaluate.mode=loglikelihood needs; vLLM does. Its reply: "
            f"{_beginning(content)!r}",
            HTTPStatus.BAD_REQUEST,  # it would reply the same again
        )
    return echoed


def read_content(content: Any) -> tuple[str, str]:
    """Return the text and the thinking of a message's content: text, null, or a list of parts.

    Parts without a text, such as images and calls of tools, are skipped. Raises ReplyError if all
    are.
    """
    if content is None or isinstance(content, str):
        return content or "", ""
    texts, thoughts = list[str](), list[str]()
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        is_thinking, part_content = _open(part)
        if part_content is None:
            continue
        text, thinking = read_content(part_content)
        thoughts += [text, thinking] if is_thinking else [thinking]
        texts += [] if is_thinking else [text]
    if parts and not texts and not thoughts:
        kinds = {
            str(part.get("type")) if isinstance(part, dict) else type(part).__name__
            for part in parts
        }
        raise ReplyError(f"the response's text is of type {', '.join(sorted(kinds))}, not text")
    return "".join(texts), "".join(thoughts)


def _open(part: Any) -> tuple[bool, Any]:
    """Return whether a part is thinking, and what it contains: None unless text or parts."""
    if not isinstance(part, dict):
        return False, part if isinstance(part, str) else None
    kind = str(part.get("type")).lower()
    is_thinking = "think" in kind or "reason" in kind
    names = (*_THINKING, "summary", *_TEXTS) if is_thinking else _TEXTS
    held = (part[name] for name in names if isinstance(part.get(name), str | list | dict))
    return is_thinking, next(held, None)


def _thinking_of(content: Any) -> str:
    try:
        return "".join(read_content(content))
    except ReplyError:
        return ""


def _content_of(fields: dict[str, Any], choice: dict[str, Any], has_thinking: bool) -> Any:
    """Return the content of a message, or the text of a choice; null if only thinking is there."""
    for place, name in ((fields, "content"), (choice, "text"), (fields, "refusal")):
        if place.get(name) is not None:
            return place[name]
    if has_thinking or fields.keys() & {"content", "text", "tool_calls", "function_call"}:
        return None
    raise ReplyError(f"the first choice has no content, only {', '.join(choice) or 'nothing'}")


def _parse(content: bytes) -> Any:
    try:
        return parse_json(content)
    except (ValueError, RecursionError) as error:
        start = content.lstrip()[:6]
        kind = (
            "a web page"
            if start.startswith(b"<")
            else "a stream of events, which was not requested"
            if start.startswith((b"data:", b"event:"))
            else f"invalid JSON in a body of {len(content)} bytes ({error})"
        )
        raise ReplyError(f"{kind}: {_beginning(content)[:100]!r}") from None


def _choices(payload: Any, content: bytes) -> list[dict[str, Any]]:
    """Return the choices of a reply, at least one. Raises ReplyError."""
    choices = payload.get("choices") if isinstance(payload, dict) else None
    found = [one for one in choices if isinstance(one, dict)] if isinstance(choices, list) else []
    for place in (payload, *found[:1]):
        if isinstance(place, dict) and (error := place.get("error")):
            code = str(error.get("code")) if isinstance(error, dict) else ""
            status = int(code) if re.fullmatch(r"[45]\d\d", code) else HTTPStatus.OK
            raise ReplyError(f"an error in place of a completion: {_beginning(content)!r}", status)
    if not found:
        raise ReplyError(f"not a completion: {_beginning(content)!r}")
    return found


def read_count(usage: Any, name: str) -> int | None:
    """Return a token count of the usage or its details, whether written as 7, 7.0 or "7"."""
    for place in (usage, usage.get("completion_tokens_details") if isinstance(usage, dict) else 0):
        value = place.get(name) if isinstance(place, dict) else None
        if isinstance(value, str) and value.isdecimal():
            value = float(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return int(value) if 0 <= value < _MAX_COUNT and value == int(value) else None
    return None


def _beginning(content: bytes) -> str:
    return redact(content.decode("utf-8", "replace"))[:_MAX_SHOWN_CHARS]
