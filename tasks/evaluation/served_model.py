"""Identifies the model behind a running server, by its files and by the log-probs it returns."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from downloads.nearest import nearest
from durable import write_atomically
from eval.advice import advise
from eval.endpoint import Endpoint, address_of
from eval.requests.identity import LogProbs, Weights, probe_requests, read_logprobs
from redaction import redact
from tasks.artifacts.artifact import canonical_json
from tasks.artifacts.references import once_per_run
from tasks.config import ChainConfig
from tasks.config.evaluate import BaselineConfig
from tasks.serve_model.failure import ServeError, ServerUnreachable
from tasks.serve_model.servers import Server

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
CLIENT_SECONDS = 60.0
KNOWN_FOLDER = ".served"  # of a store
_NO_LIST = (404, 405, 501)  # a server without /models


@dataclass(frozen=True)
class ServedModel:
    """A model behind a URL, with its identity as observed through the server."""

    server: Server
    identity: str  # digest of its folder or name, and of local files
    weights: Weights  # as first stored, since log-probs of equal weights differ by rounding
    known: Path  # file that lists the weights seen under this identity

    @property
    def digest(self) -> str:
        """Stands for the weights in the key of an evaluation."""
        return hashlib.sha256(canonical_json([self.identity, self.weights.to_json()])).hexdigest()

    def remember(self) -> None:
        """Store the weights for later runs."""
        listed = _known_weights(self.known)
        if self.weights not in listed:
            self.known.parent.mkdir(parents=True, exist_ok=True)
            stored = [weights.to_json() for weights in (*listed, self.weights)]
            write_atomically(self.known, json.dumps(stored))


def server_of(baseline: BaselineConfig) -> Server:
    """The server of a baseline. Raises ServeError if the variable with its API key is not set."""
    key, variable = "", baseline.api_key_variable
    if variable is not None and not (key := os.environ.get(variable, "")):
        raise ServeError(
            f"evaluate.baselines: {baseline.name} reads its API key from {variable}, which is not "
            "set; set it where the run (or its Prefect worker) starts"
        )
    return Server(str(baseline.base_url), str(baseline.model), key)


def served_model(config: ChainConfig, baseline: BaselineConfig) -> ServedModel:
    """The model that a baseline's server serves, queried once per run.

    Raises ServeError if it serves no model of that name, and ServerUnreachable if it does not
    answer.
    """
    folder = Path(config.store.path).absolute() / KNOWN_FOLDER
    return once_per_run((config.store.path, baseline), lambda: _query(folder, baseline))


def _query(folder: Path, baseline: BaselineConfig) -> ServedModel:
    server, variable = server_of(baseline), baseline.api_key_variable or "its api_key_variable"
    terms = ServedBy(f"base_url of evaluate.baselines: {baseline.name}", "its `model`", variable)
    identity = served_model_identity(server, terms)
    weights = Weights(None, _logprobs(server))
    known = folder / f"{identity[:16]}.json"
    same = (other for other in _known_weights(known) if other.difference(weights) is None)
    return ServedModel(server, identity, next(same, weights), known)


def _known_weights(path: Path) -> list[Weights]:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return [weights for entry in stored if (weights := Weights.of(entry)) is not None]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, AttributeError) as error:
        logger.warning("%s cannot be read (%s): the weights are queried again", path, error)
        return []


def _logprobs(server: Server) -> LogProbs | None:
    """Log-probs of a fixed prompt; None if the server has none. Raises ServerUnreachable."""
    with model_client(server) as client:
        for path, body in probe_requests(server.model):
            answer = _post(client, server.url(path), body)
            with contextlib.suppress(ValueError):
                if answer.is_success and (found := read_logprobs(answer.json())) is not None:
                    return found
    return None


def _post(client: httpx.Client, url: str, body: Mapping[str, Any]) -> httpx.Response:
    """POST with retries while the server is busy or unreachable."""
    reason = ""
    for attempt in range(MAX_ATTEMPTS):
        time.sleep(attempt)
        try:
            answer = client.post(url, json=body)
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            continue
        is_failing = answer.status_code == 500 and attempt == MAX_ATTEMPTS - 1  # on this request
        is_busy = answer.status_code >= 500 or answer.status_code == httpx.codes.TOO_MANY_REQUESTS
        if is_failing or not is_busy:
            return answer
        reason = f"HTTP {answer.status_code}"
    raise ServerUnreachable(f"{url} does not answer a fixed prompt: {reason}")


@dataclass(frozen=True)
class ServedBy:
    """How the user specified a server, for error messages."""

    url: str = "--base-url"
    model: str = "--model-name"
    key_variable: str = "VLLM_API_KEY"


def served_folder(server: Endpoint) -> Path | None:
    """The folder of the served model, if it is on this machine."""
    root = Path(_served_models(server, ServedBy()).get(server.model, ""))
    return root if (root / "config.json").is_file() else None


def served_model_identity(server: Endpoint, terms: ServedBy = ServedBy()) -> str:
    """A digest of the served model: its folder, and its files if they are local.

    A server that lists no models is trusted to serve the name. Raises ServeError if a server lists
    others, and ServerUnreachable if it does not answer.
    """
    roots = _served_models(server, terms)
    if not roots:
        logger.warning(
            "%s lists no models: trusting that it serves %r", server.address, server.model
        )
    elif server.model not in roots:
        raise ServeError(
            f"{address_of(server.url('models'))} does not serve {server.model!r}"
            f"{nearest(server.model, list(roots))}; set {terms.model}"
        )
    folder = Path(roots.get(server.model, server.model))
    files = [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(folder.glob("*.safetensors"))
    ]
    return hashlib.sha256(repr((str(folder), files)).encode()).hexdigest()


def model_client(server: Endpoint, terms: ServedBy = ServedBy()) -> httpx.Client:
    """An HTTP client with the server's API key; local servers are reached without a proxy."""
    api_key = server.api_key or ""
    if not (api_key.isascii() and api_key.isprintable()):  # the HTTP library's error would quote it
        raise ServeError(
            f"{terms.key_variable} holds a character that HTTP headers forbid, such as a newline; "
            "correct it"
        )
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.Client(headers=headers, timeout=CLIENT_SECONDS, trust_env=not server.is_local)


def _served_models(server: Endpoint, terms: ServedBy) -> dict[str, str]:
    """Served name -> model folder, or the name itself if the server does not list the folder.

    Empty if the server lists no models.
    """
    url = server.url("models")
    shown = address_of(url)
    try:
        with model_client(server, terms) as client:
            answer = client.get(url)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerUnreachable(
            f"{shown} does not answer: {str(error) or type(error).__name__}; start it with dapo "
            f"serve, or check {terms.url}"
        ) from None
    if answer.status_code in (401, 403):
        reason = f"{terms.key_variable} is not " + ("the server's" if server.api_key else "set")
        raise ServeError(f"{shown} refuses the key: HTTP {answer.status_code}; {reason}")
    if answer.status_code in _NO_LIST:
        return {}
    try:
        listed = answer.raise_for_status().json()
    except (httpx.HTTPStatusError, ValueError, RecursionError):
        advice = advise(answer.status_code, answer.text, (), answer.headers.get("location", ""))
        kind = ServerUnreachable if answer.is_server_error else ServeError
        raise kind(
            f"{shown} does not list models: HTTP {answer.status_code}, "
            f"{redact(answer.text)[:100]!r}. {advice}"
        ) from None
    models = listed.get("data") if isinstance(listed, dict) else None
    named = [one for one in models if isinstance(one, dict)] if isinstance(models, list) else []
    return {str(one["id"]): str(one.get("root") or one["id"]) for one in named if one.get("id")}
