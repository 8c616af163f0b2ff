"""Measurements of a model in a process of its own.

MLX reads its variables once. Takes a MeasurementTask as a line of JSON on standard input, ends with
that input if it is told to follow its parent, and prints a JSON line for each measurement.
"""

import os
import sys

import msgspec
from msgspec import Struct

import mlxstack.engine  # noqa: F401  (the attention patch goes before any model file)
from mlxstack.core.preset import KVSpec, ModelSpec
from mlxstack.engine.checks.measurements import DeviceTimer, Measurement
from mlxstack.engine.loading import loader
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.host.command_buffers import VARIABLES
from mlxstack.host.parent_watchdog import follow_supervisor

OWN = "MLX's own"


class MeasurementTask(Struct, frozen=True):
    """Model to measure, and seconds for all or the short measurements."""

    model: ModelSpec
    kv: KVSpec
    seconds: float
    is_short: bool = False


def main() -> None:
    """Load the model, and print its measurements."""
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=MeasurementTask)
    follow_supervisor(os.environ)
    model = loader.load(task.model, task.kv).model
    timer = DeviceTimer(model, CacheFactory(model, task.kv), task.seconds)
    _print(Measurement("command buffers", {name: os.environ.get(name, OWN) for name in VARIABLES}))
    for measurement in timer.short() if task.is_short else timer.all():
        _print(measurement)


def _print(measurement: Measurement) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(measurement) + b"\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
