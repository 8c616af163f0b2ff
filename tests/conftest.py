"""What all tests share: tiny models, built once; an interrupt that reaches every process."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ModelOf = Callable[[str], Path]

# A shell that starts us in the background ignores it for us, and for every program that we start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What a property test says does not depend on how busy the machine is.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> ModelOf:
    """The folder of a tiny random model by its kind, such as "tiny-swa"."""
    from tests.models import build

    root = tmp_path_factory.mktemp("models")

    def folder(kind: str) -> Path:
        path = root / kind
        return path if path.exists() else build(path, kind)

    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow files first, so that no worker waits at the end for another's last file."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
