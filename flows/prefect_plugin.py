"""Prefect start-up plugin: `prefect deployment run dapo-full` finds the only deployment of that name.

Prefect itself wants FLOW/DEPLOYMENT. The plugin is loaded by each `import prefect` in the project's folder, so it
does nothing for any other command, and nothing where Prefect's method is not the one it knows.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any

from prefect.plugins import register_hook

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient
    from prefect.plugins import HookContext

COMMANDS = {"deployment", "deployments"}


@register_hook
def setup_environment(*, ctx: HookContext) -> None:
    """Let the commands about deployments take a name without a slash."""
    if COMMANDS.isdisjoint(sys.argv[1:]):
        return
    from prefect.client.orchestration import PrefectClient

    method = getattr(PrefectClient, "read_deployment_by_name", None)
    if not inspect.iscoroutinefunction(method) or list(inspect.signature(method).parameters) != ["self", "name"]:
        return

    @functools.wraps(method)
    async def read_deployment_by_name(self: PrefectClient, name: str) -> Any:
        return await method(self, name if "/" in name else await resolve_name(self, name))

    PrefectClient.read_deployment_by_name = read_deployment_by_name  # type: ignore[assignment]


async def resolve_name(client: PrefectClient, name: str) -> str:
    """FLOW/DEPLOYMENT of the only deployment called `name`; raises ValueError that names the ones there are."""
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName

    named = DeploymentFilter(name=DeploymentFilterName(any_=[name]))
    candidates = await full_names(client, named)
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise ValueError(f"several deployments are called {name!r}; say which: {', '.join(candidates)}")
    known = ", ".join(await full_names(client, None))
    raise ValueError(f"no deployment is called {name!r}; there are: {known or 'none, see prefect deploy --all'}")


async def full_names(client: PrefectClient, chosen: Any) -> list[str]:
    """FLOW/DEPLOYMENT of the deployments that a filter lets through, sorted."""
    deployments = await client.read_deployments(deployment_filter=chosen)
    flows = {flow_id: await client.read_flow(flow_id) for flow_id in {each.flow_id for each in deployments}}
    return sorted(f"{flows[each.flow_id].name}/{each.name}" for each in deployments)
