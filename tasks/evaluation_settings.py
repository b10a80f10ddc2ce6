"""Evaluate running servers as the section `evaluate` says, and check that they serve one model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from eval.client import LOOPBACK, Endpoint, Sampling
from eval.dispatch import Limits
from eval.problems.items import EvaluationSet
from eval.run import OnProgress, evaluate
from eval.summary import Summary
from redaction import redact
from tasks.config import EvaluateConfig
from tasks.serve_model.failure import ServeError, ServerUnreachable

CLIENT_SECONDS = 60.0


def evaluate_servers(
    evaluation_set: EvaluationSet,
    servers: Sequence[Endpoint],
    settings: EvaluateConfig,
    output_dir: Path,
    model_digest: str,
    on_progress: OnProgress | None = None,
) -> Summary:
    """`eval.run.evaluate` with the configuration's sampling and limits."""
    return evaluate(
        evaluation_set,
        servers,
        Sampling(
            max_tokens=settings.max_response_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            seed=settings.seed,
            num_samples=settings.num_samples,
        ),
        output_dir,
        limits=Limits(
            concurrency=settings.concurrency,
            requests_per_second=settings.requests_per_second,
            timeout_seconds=settings.request_timeout_seconds,
            max_attempts=settings.max_attempts,
            outage_seconds=settings.outage_seconds,
        ),
        model_digest=model_digest,
        max_failed_ratio=settings.max_failed_ratio,
        on_progress=on_progress,
    )


@dataclass(frozen=True)
class ServedBy:
    """How the user names a server, for errors."""

    url: str = "--base-url"
    model: str = "--model-name"
    key_variable: str = "VLLM_API_KEY"


def served_model_identity(servers: Sequence[Endpoint], said: ServedBy = ServedBy()) -> str:
    """A digest of the served model: its folder, and the files there if they are local.

    Raises ServeError when a server does not serve that name, or serves another model than the first one, and
    ServerUnreachable when one does not answer.
    """
    identities = [_identity(server, said) for server in servers]
    for server, identity in zip(servers, identities, strict=True):
        if identity != identities[0]:
            raise ServeError(
                f"{server.base_url} serves {identity[0]}, {servers[0].base_url} {identities[0][0]}, or other "
                f"files of that name: an evaluation is of one model; start all servers with the same folder"
            )
    return hashlib.sha256(repr(identities[0]).encode()).hexdigest()


def _identity(server: Endpoint, said: ServedBy) -> tuple[str, list[tuple[str, int, int]]]:
    url = server.url("models")
    roots = _served_models(server, said)
    if server.model not in roots:
        raise ServeError(f"{url} serves {', '.join(roots)}, not {server.model!r}; set {said.model}")
    folder = Path(roots[server.model])
    files = [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.glob("*.safetensors"))
    ]
    return str(folder), files


def model_client(server: Endpoint, said: ServedBy = ServedBy()) -> httpx.Client:
    """A client with the server's key. One on this machine is reached without the environment's proxy."""
    api_key = server.api_key or ""
    if not (api_key.isascii() and api_key.isprintable()):  # the HTTP library's own refusal would quote it
        raise ServeError(
            f"{said.key_variable} holds a character that HTTP headers forbid, such as a newline; set it again"
        )
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    is_near = urlsplit(server.base_url).hostname in LOOPBACK
    return httpx.Client(headers=headers, timeout=CLIENT_SECONDS, trust_env=not is_near)


def _served_models(server: Endpoint, said: ServedBy) -> dict[str, str]:
    """Served name -> model folder, or the name again if the server does not list the folder."""
    url = server.url("models")
    try:
        with model_client(server, said) as client:
            answer = client.get(url)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerUnreachable(
            f"{url} does not answer: {str(error) or type(error).__name__}; start it with dapo serve, or check "
            f"{said.url}"
        ) from None
    if answer.status_code in (401, 403):
        why = f"{said.key_variable} is not " + ("the server's" if server.api_key else "set")
        raise ServeError(f"{url} refuses the key: HTTP {answer.status_code}; {why}")
    try:
        models = answer.raise_for_status().json()["data"]
        return {model["id"]: str(model.get("root") or model["id"]) for model in models}
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError):
        raise ServeError(
            f"{url} does not list models: HTTP {answer.status_code}, {redact(answer.text)[:100]!r}; {said.url} "
            "must be an OpenAI-compatible server"
        ) from None
