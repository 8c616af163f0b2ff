"""Shared by all tests: an environment of their own, tiny models, an interrupt for every process."""

import functools
import gc
import importlib.util
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, settings

from tests import environment

# Before a module of the package or of the hub's client reads a variable.
environment.isolate()

from tests import forked  # noqa: E402
from tests.patience import PATIENCE_S  # noqa: E402

ModelOf = Callable[[str], Path]
LENGTHS = {"slow": 4.0, "mlx": 2.0, "net": 2.0}
UNMARKED = 0.1
"""Seconds that a test is expected to take by its marker, to order the files."""

MAX_NAMED = 200
"""Characters of a parameter that is a part of a test's name."""

DEVICE = environment.option("TEST_DEVICE") or "cpu"
"""`gpu` runs the tests marked `metal` alone. Others compare exactly: batch to row, hit to cold."""
if DEVICE != "gpu":
    os.environ["MLX_STACK_CPU"] = "1"

# A shell that starts us in the background ignores it for us, and for every program that we start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# MLX wakes a thread for every operation on a CPU. Under this policy, which processes and threads
# inherit, a woken thread preempts no other, which saves most of the context switches.
if sys.platform == "linux":
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

forked.install()

# What a property test says does not depend on how busy the machine is.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# Without a limit of its own, a request of the tests ends after 5 s.
for phase in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, phase, PATIENCE_S)

# Each client would read all certificates of the web again; none of the tests leaves this machine.
# `httpx2` is that of the SDKs.
for name in filter(importlib.util.find_spec, ("httpx", "httpx2")):
    transports = importlib.import_module(f"{name}._transports.default")
    transports.create_ssl_context = functools.cache(transports.create_ssl_context)


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> ModelOf:
    """The folder of a tiny random model by its kind, such as "tiny-swa"."""
    from tests.models import build

    root = tmp_path_factory.mktemp("models")

    def folder(kind: str) -> Path:
        path = root / kind
        return path if path.exists() else build(path, kind)

    return folder


@pytest.fixture(scope="session", autouse=True)
def pinned_device() -> None:
    """Compute on the CPU, also where no engine is imported."""
    if DEVICE != "gpu" and "mlx.core" in sys.modules:
        mx = sys.modules["mlx.core"]
        mx.set_default_device(mx.cpu)


@pytest.fixture(scope="session", autouse=True)
def self_checks() -> Iterator[None]:
    """Remember what an engine finds out about a model, where an engine may start in here."""
    if "mlxstack.engine.assembly" not in sys.modules:
        yield
        return
    from tests.self_checks import REMEMBERED

    with pytest.MonkeyPatch.context() as patch:
        for module, name, remembered in REMEMBERED:
            patch.setattr(module, name, remembered)
        yield


@pytest.fixture(scope="module", autouse=True)
def homes_of_their_own() -> Iterator[None]:
    """No test makes the default home, which it would share with others."""
    yield
    home = environment.default_home()
    assert not home.exists(), f"a test of this file has written to the default home, {home}"


@pytest.fixture(scope="module", autouse=True)
def memory_limit_stays() -> Iterator[None]:
    """No test lowers the limit above which MLX computes several times more slowly."""
    before = _memory_limit()
    yield
    assert before in (None, _memory_limit()), "a test of this file has changed MLX's memory limit"


def _memory_limit() -> int | None:
    """MLX's limit in bytes; None where it is not imported."""
    mx = sys.modules.get("mlx.core")
    if mx is None:
        return None
    limit: int = mx.set_memory_limit(2**50)
    mx.set_memory_limit(limit)
    return limit


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name a long value by its length: each worker tells the names of all tests."""
    if isinstance(val, str | bytes) and len(val) > MAX_NAMED:
        return f"{argname}-{len(val)}"
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the repetitions of `make soak` too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave repetition to `make soak`; run long files first, so that no worker waits at the end.

    On a GPU only tests that allow its rounding run.
    """
    if DEVICE == "gpu":
        exact = [item for item in items if not item.get_closest_marker("metal")]
        config.hook.pytest_deselected(items=exact)
        items[:] = [item for item in items if item.get_closest_marker("metal")]
    if not config.getoption("--soak"):
        config.hook.pytest_deselected(
            items=[test for test in items if test.get_closest_marker("soak")]
        )
        items[:] = [item for item in items if not item.get_closest_marker("soak")]
    length = Counter[Path]()
    for item in items:
        marked = (n for name, n in LENGTHS.items() if item.get_closest_marker(name))
        length[item.path] += max(marked, default=UNMARKED)
    items.sort(key=lambda item: -length[item.path])


def pytest_collection_finish() -> None:
    """Exempt what the imports left from garbage collection, whose time it is otherwise."""
    _exempt_from_collection()


@pytest.fixture(scope="module", autouse=True)
def what_a_file_left() -> Iterator[None]:
    """Exempt it too: an engine that unloads collects garbage, among all that is alive."""
    yield
    _exempt_from_collection()


def _exempt_from_collection() -> None:
    gc.collect()
    gc.freeze()
