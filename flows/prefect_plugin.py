"""Prefect start-up plugin for `prefect` typed in the project's folder.

It reaches the server of `dapo up` without an export, with the project's settings, unless the user has others;
`prefect deployment run dapo-full` finds the only deployment of that name, where Prefect itself wants
FLOW/DEPLOYMENT, and refuses a wrong recipe or override of a deployment of that folder in our own words. The plugin
is loaded by each `import prefect` there, so it does nothing for any other program, and nothing where a method of
Prefect's is not the one it knows.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect.plugins import SetupResult, register_hook

from dapo_core.errors import ConfigError
from flows.prefect_settings import project_settings
from flows.services.daemons import api_url
from tasks.serve_model.failure import ServeError

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient
    from prefect.plugins import HookContext

PROGRAMS = {"prefect", "-m"}  # -m: python -m prefect, which is being imported
COMMANDS = {"deployment", "deployments"}


@register_hook
def setup_environment(*, ctx: HookContext) -> SetupResult | None:
    """Complete the environment of `prefect`; have its commands about deployments know ours."""
    if Path(sys.argv[0]).name not in PROGRAMS:
        return None
    if not COMMANDS.isdisjoint(sys.argv[1:]):
        take_names_without_slash()
        refuse_wrong_parameters()
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


def refuse_wrong_parameters() -> None:
    """Have the client's method load the recipe first, unless the method is not the one we know."""
    from prefect.client.orchestration import PrefectClient

    method = getattr(PrefectClient, "create_flow_run_from_deployment", None)
    begin = ["self", "deployment_id", "parameters"]
    if not inspect.iscoroutinefunction(method) or list(inspect.signature(method).parameters)[:3] != begin:
        return

    @functools.wraps(method)
    async def create_flow_run_from_deployment(
        self: PrefectClient, deployment_id: Any, *, parameters: dict[str, Any] | None = None, **options: Any
    ) -> Any:
        check_parameters(await self.read_deployment(deployment_id), parameters or {})
        return await method(self, deployment_id, parameters=parameters, **options)

    PrefectClient.create_flow_run_from_deployment = create_flow_run_from_deployment  # type: ignore[assignment]


def check_parameters(deployment: Any, parameters: dict[str, Any]) -> None:
    """End the command with what is wrong in the configuration, where the worker is to load it in this same folder.

    Parameters of another type are the server's to refuse.
    """
    from flows.config import load_config

    steps = [step for each in deployment.pull_steps or () for step in each.values()]
    if not any(step.get("directory") == str(Path.cwd()) for step in steps):
        return
    given = {**deployment.parameters, **parameters}
    config, overrides = given.get("config"), given.get("overrides", [])
    if not isinstance(config, str) or not isinstance(overrides, list):
        return
    if all(isinstance(override, str) for override in overrides):
        try:
            load_config(config, overrides)
        except ConfigError as error:
            raise SystemExit(str(error)) from None


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
