"""Says what to change after a failed request, by its status, its URL and the server's reply."""

from __future__ import annotations

import re
from collections.abc import Iterable

from eval.endpoint import NULLABLE, REQUEST_KEYS, address_of

_TOO_LONG = re.compile(r"(?i)context.(length|window|size)|max_model_len|too long|input length")
_NO_MODEL = re.compile(
    r"(?i)model_not_found|\bmodel\b.{0,80}\b(does not exist|not found|not exist|no such)|"
    r"\b(unknown|invalid|no such) model\b"
)
_NO_TEMPLATE = re.compile(r"(?i)chat.?template")
_NEEDED = frozenset({"model", "messages", "prompt"})
_WEB_PAGE = re.compile(r"(?i)<(!doctype|html|head|body)\b")

_KEY = (
    "The server rejects the API key: export VLLM_API_KEY with a valid one (for a baseline, the "
    "variable that its api_key_variable names)."
)
_URL = (
    "No API answers at this URL: correct the base URL. /v1 is added to it unless it names a "
    "version, such as /api/v3, or ends in /chat/completions. If only this request is missing, set "
    "evaluate.api."
)
_BY_STATUS = {
    401: _KEY,
    403: _KEY,
    404: _URL,
    405: _URL,
    408: "The server or a proxy gave up waiting: raise its time limit, or lower "
    "evaluate.concurrency.",
    413: "The request is larger than the server or a proxy accepts: raise its limit.",
    429: "The server limits the rate: lower evaluate.concurrency, set "
    "evaluate.requests_per_second, or check the account's quota.",
    504: "A proxy gave up waiting for the server: raise its time limit, or lower "
    "evaluate.concurrency.",
}
_PROXY = "A proxy or firewall answers with a web page in place of the server: see its settings."
_REFUSED = "The server refuses this request and would refuse it again; its reply says why."
_FAILED = "The server failed: see its log. It may be overloaded: lower evaluate.concurrency."


def advise(status: int, reply: str, sent: Iterable[str] = (), location: str = "") -> str:
    """Return what to change after this status and reply; "" without advice.

    `sent` are the fields of the request, `location` is where the server redirects to.
    """
    if 300 <= status < 400:
        return f"The server redirects to {address_of(location) or 'no URL'}: use that base URL."
    if status >= 400 and (found := _by_words(status, reply, sent)):
        return found
    if _WEB_PAGE.search(reply) and status not in (401, 404, 405, 413):
        return _URL if status < 300 else _PROXY
    usual = _FAILED if status >= 500 else _REFUSED if status >= 400 else ""
    return _BY_STATUS.get(status, usual)


def _by_words(status: int, reply: str, sent: Iterable[str]) -> str:
    """Return advice by what the server's reply names, or ""."""
    if _TOO_LONG.search(reply):
        return (
            "The prompt and evaluate.max_response_tokens are longer than the server's context: "
            "lower evaluate.max_response_tokens, or raise serve.max_model_len if this project "
            "serves the model."
        )
    if _NO_MODEL.search(reply):
        return "Set --model-name (for a baseline, its `model`) to a name that the server serves."
    if status not in (400, 422):
        return ""
    if _NO_TEMPLATE.search(reply):
        return "Set evaluate.api=completions, or serve the model with a chat template."
    named = [name for name in sent if name not in _NEEDED and _names(reply, name)]
    return " ".join(map(_about_field, named))


def _names(reply: str, field: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(field)}(?![\w-])", reply) is not None


def _about_field(name: str) -> str:
    key = REQUEST_KEYS.get(
        name, f"evaluate.extra_body or evaluate.renamed_fields, which set {name}"
    )
    ways = [f"change {key}"]
    if name in NULLABLE:
        ways += [
            f"leave the field out with {key}=null",
            f"rename it with evaluate.renamed_fields={{{name}: OTHER}}",
        ]
    return f"The server names the field {name}: {', or '.join(ways)}."
