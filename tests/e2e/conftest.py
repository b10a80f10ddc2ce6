"""What these tests share with the integration tests."""

from tests.integration.conftest import home, ray_address, world

__all__ = ["home", "ray_address", "world"]
