"""Points the hub clients at a local hub, in this process and its children."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from modelscope_hub.config import set_default_config

from downloads import urls
from tasks.artifacts.references import forget_resolved
from tests.hub_server import HubServer, serving

TOKENS = ("HF_TOKEN", "MODELSCOPE_API_TOKEN")


@contextlib.contextmanager
def hub_of_this_machine(folder: Path) -> Iterator[HubServer]:
    """A local hub that the clients use inside the block."""
    with pytest.MonkeyPatch.context() as patch, serving() as server:
        patch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setenv("HF_ENDPOINT", server.url)
        patch.setenv("HF_HOME", str(folder / "hf"))
        patch.setenv("MODELSCOPE_ENDPOINT", server.url)
        for name in (*TOKENS, "HF_HUB_OFFLINE"):
            patch.delenv(name, raising=False)
        patch.setattr(urls, "BACKOFF_SECONDS", 0.01)
        set_default_config(None)
        forget_resolved()
        try:
            yield server
        finally:
            set_default_config(None)
            forget_resolved()
