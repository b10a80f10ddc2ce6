"""The configuration's section `evaluate` in the terms of the package eval, which knows no configuration."""

from __future__ import annotations

import hashlib
from pathlib import Path

import httpx

from dapo_core.config import EvaluateConfig
from dapo_core.errors import ServeError
from eval.client import Endpoint, Sampling
from tasks.serve_model import Server


def endpoint_of(server: Server, settings: EvaluateConfig) -> Endpoint:
    """The client's view of a server."""
    return Endpoint(
        base_url=server.base_url,
        model=server.model,
        api_key=server.api_key,
        concurrency=settings.concurrency,
        timeout_seconds=settings.request_timeout_seconds,
        max_attempts=settings.max_attempts,
    )


def served_model_identity(server: Server) -> str:
    """What tells the model behind a URL from another of the same name: its folder, and the files there if local.

    Raises ServeError when the server cannot be reached or does not serve that name.
    """
    headers = {"Authorization": f"Bearer {server.api_key}"}
    url = f"{server.base_url.rstrip('/').removesuffix('/v1')}/v1/models"
    try:
        answer = httpx.get(url, headers=headers, timeout=30.0).raise_for_status().json()
        roots = {model["id"]: str(model.get("root") or model["id"]) for model in answer["data"]}
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ServeError(f"{url} does not list models: {error}; check --base-url and VLLM_API_KEY") from None
    if server.model not in roots:
        raise ServeError(f"{url} serves {', '.join(roots)}, not {server.model!r}; set --model-name")
    folder = Path(roots[server.model])
    files = [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.glob("*.safetensors"))
    ]
    return hashlib.sha256(repr((str(folder), files)).encode()).hexdigest()


def sampling_of(settings: EvaluateConfig) -> Sampling:
    """How the configuration wants answers sampled."""
    return Sampling(
        max_tokens=settings.max_response_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        seed=settings.seed,
    )
