"""Prefect start-up plugin for `prefect` typed in the project's folder.

It reaches the server of `dapo up` without an export, with the project's settings, unless the user has others; and
`prefect deployment run dapo-full` finds the only deployment of that name, where Prefect itself wants
FLOW/DEPLOYMENT. The plugin is loaded by each `import prefect` in that folder, so it does nothing for any other
program, and nothing where Prefect's method is not the one it knows.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect.plugins import SetupResult, register_hook

from dapo_core.errors import ServeError
from flows.prefect_settings import project_settings
from flows.services.daemons import api_url

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient
    from prefect.plugins import HookContext

PROGRAMS = {"prefect", "-m"}  # -m: python -m prefect, which is being imported
COMMANDS = {"deployment", "deployments"}


@register_hook
def setup_environment(*, ctx: HookContext) -> SetupResult | None:
    """Complete the environment of `prefect`; let its commands about deployments take a name without a slash."""
    if Path(sys.argv[0]).name not in PROGRAMS:
        return None
    if not COMMANDS.isdisjoint(sys.argv[1:]):
        take_names_without_slash()
    missing = {name: value for name, value in project_settings().items() if name not in os.environ}
    if not ctx.api_url:
        try:
            url = api_url()
        except ServeError as error:  # the settings hold all the same
            ctx.logger_factory(__name__).warning("the server of `dapo up` is not known: %s", error)
            url = None
        if url:
            missing["PREFECT_API_URL"] = url
    return SetupResult(env=missing)


def take_names_without_slash() -> None:
    """Have the client's method look for the flow's name, unless the method is not the one we know."""
    from prefect.client.orchestration import PrefectClient

    method = getattr(PrefectClient, "read_deployment_by_name", None)
    if not inspect.iscoroutinefunction(method) or list(inspect.signature(method).parameters) != ["self", "name"]:
        return

    @functools.wraps(method)
    async def read_deployment_by_name(self: PrefectClient, name: str) -> Any:
        return await method(self, name if "/" in name else await resolve_name(self, name))

    PrefectClient.read_deployment_by_name = read_deployment_by_name  # type: ignore[assignment]


async def resolve_name(client: PrefectClient, name: str) -> str:
    """FLOW/DEPLOYMENT of the only deployment called `name`; ends the command with the names there are."""
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName

    named = DeploymentFilter(name=DeploymentFilterName(any_=[name]))
    candidates = await full_names(client, named)
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise SystemExit(f"several deployments are called {name!r}; say which: {', '.join(candidates)}")
    known = ", ".join(await full_names(client, None))
    raise SystemExit(f"no deployment is called {name!r}; there are: {known or 'none, see prefect deploy --all'}")


async def full_names(client: PrefectClient, chosen: Any) -> list[str]:
    """FLOW/DEPLOYMENT of the deployments that a filter lets through, sorted."""
    deployments = await client.read_deployments(deployment_filter=chosen)
    flows = {flow_id: await client.read_flow(flow_id) for flow_id in {each.flow_id for each in deployments}}
    return sorted(f"{flows[each.flow_id].name}/{each.name}" for each in deployments)
