"""What these tests share with the integration tests."""

from tests.integration.conftest import home, world

__all__ = ["home", "world"]
