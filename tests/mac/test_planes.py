"""Bytes of KV for its files: read with one wait for the device."""

from typing import Any

import mlx.core as mx
import pytest

from mlxstack.engine.kv.segments import from_plane, to_planes

pytestmark = pytest.mark.mlx


def test_all_arrays_of_a_file_are_evaluated_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real = mx.eval
    waits = []

    def evaluate(*arrays: Any) -> None:
        waits.append(len(arrays[0]))
        real(*arrays)

    whole = mx.arange(960, dtype=mx.float32).reshape(4, 4, 60).astype(mx.bfloat16)
    arrays = [whole[:, i : i + 2, ::2] for i in range(3)]
    real(arrays)
    monkeypatch.setattr(mx, "eval", evaluate)
    planes = to_planes(arrays)
    assert waits == [3]
    for array, plane in zip(arrays, planes, strict=True):
        assert plane.shape == array.shape
        assert mx.array_equal(from_plane(plane), array)
