"""Prefect start-up plugin for the `prefect` command in the project's folder.

It lets `prefect` find the server of `dapo up` without PREFECT_API_URL, applies the project's
settings unless the user set others, and accepts `dapo-full` for `dapo-full/dapo-full`. Every
`import prefect` in the folder loads the plugin, so it does nothing in other programs.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from prefect.plugins import SetupResult, register_hook

from dapo_core.errors import ConfigError
from flows.prefect_settings import PROJECT_SETTINGS, no_proxy
from flows.services import api_url, read_deployments

if TYPE_CHECKING:
    from prefect.plugins import HookContext

PROGRAMS = {"prefect", "-m"}  # -m: python -m prefect, which is being imported
COMMANDS = {"deployment", "deployments"}


@register_hook
def setup_environment(*, ctx: HookContext) -> SetupResult | None:
    """Add the project's settings to the environment and expand deployment names in sys.argv."""
    if Path(sys.argv[0]).name not in PROGRAMS:
        return None
    if not COMMANDS.isdisjoint(sys.argv[1:]):
        sys.argv[1:] = complete_names(sys.argv[1:], Path.cwd())
    missing = {name: value for name, value in PROJECT_SETTINGS.items() if name not in os.environ}
    if not ctx.api_url and (url := api_url()):
        missing["PREFECT_API_URL"] = url
    return SetupResult(env=missing | {"no_proxy": no_proxy(os.environ)})


def complete_names(words: list[str], project: Path) -> list[str]:
    """Replace each deployment name in prefect.yaml by FLOW/DEPLOYMENT; both have the same name."""
    try:
        names = {deployment["name"] for deployment in read_deployments(project)}
    except ConfigError:
        return words
    for command, word in itertools.pairwise(words):
        if command == "run" and not word.startswith("-") and "/" not in word and word not in names:
            raise SystemExit(
                f"prefect.yaml has no deployment {word!r}; it has: {', '.join(sorted(names))}"
            )
    return [f"{word}/{word}" if word in names else word for word in words]
