"""Metal kernels of MLX and mlx-lm, compiled as C++ and run on this machine's processor.

Their text comes from the installed mlx-lm and from the wheel of MLX for macOS of the same version.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import gated_delta
from msgspec import Struct

SOURCES = Path(__file__).parent / "metal_shim"
CACHE = Path(sys.prefix) / "metal"
"""Headers that were downloaded, by version of MLX."""
HEADER = "mlx/include/mlx/backend/metal/kernels/quantized.h"
PLATFORM = "macosx_14_0_arm64"
FIRST = "#define MLX_MTL_CONST"
AFTER = "METAL_FUNC void qvm_impl("
"""Text with which the header's part for one and few rows begins, and that after its end."""
FLAGS = ("-std=c++20", "-O2", "-w", "-shared", "-fPIC", "-ffp-contract=off")

Numbers = np.ndarray[Any, np.dtype[np.float32]]


class MissingKernelsError(Exception):
    """No compiler here, or no wheel to be had."""


class GatedDeltaShape(Struct, frozen=True):
    """Heads and dims of a layer with the gated delta rule."""

    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 128
    value_dim: int = 16


class QuantizedProducts:
    """Products of rows (n, in) with a quantized matrix (out, in), as float32."""

    def __init__(self, matrix: mx.array, group_size: int, bits: int) -> None:
        included = {"quantized.inc": quantized_text()}
        macros = {"GROUP_SIZE": group_size, "BITS": bits}
        self._library = _compiled("qmv.cpp", included, macros)
        self._quantized = mx.quantize(matrix, group_size, bits)
        self._parts = [np.array(part) for part in self._quantized]
        self._n_outputs, self._n_inputs = matrix.shape
        self._kind = {"group_size": group_size, "bits": bits}

    def by_operation(self, rows: mx.array) -> Numbers:
        """MLX's own product on the CPU."""
        return np.array(mx.quantized_matmul(rows, *self._quantized, transpose=True, **self._kind))

    def qmv(self, rows: mx.array) -> Numbers:
        """By the kernel for one row, which reads the matrix for each of several."""
        return self._run("qmv", rows)

    def qmv_wide(self, rows: mx.array) -> Numbers:
        """By the kernel for few rows, which reads the matrix for up to five at once."""
        return self._run("qmv_wide", rows)

    def _run(self, kernel: str, rows: mx.array) -> Numbers:
        output = np.zeros((rows.shape[0], self._n_outputs), np.float32)
        sizes = (self._n_inputs, self._n_outputs, rows.shape[0])
        _launch(self._library, kernel, [*self._parts, np.array(rows), output], sizes)
        return output


class GatedDeltaKernels:
    """mlx-lm's kernels of the gated delta rule, by name."""

    def __init__(self, shape: GatedDeltaShape) -> None:
        bodies = gated_delta_bodies()
        self.names = list(bodies)
        included = {f"{name}.inc": body for name, body in bodies.items()}
        macros = {name.upper(): getattr(shape, name) for name in shape.__struct_fields__}
        self._library = _compiled("gated_delta.cpp", included, macros)

    def run(self, name: str, inputs: Sequence[mx.array]) -> tuple[Numbers, Numbers]:
        """Outputs and new state of q, k, v, g, beta and the state, as float32."""
        values = inputs[2]
        output = np.zeros(values.shape, np.float32)
        state = np.zeros(inputs[-1].shape, np.float32)
        arrays = [*(np.array(array) for array in inputs), output, state]
        _launch(self._library, f"run_{name}", arrays, values.shape[:2])
        return output, state


def header() -> Path:
    """MLX's header of this version, downloaded once."""
    path = CACHE / version("mlx") / Path(HEADER).name
    if path.exists():
        return path
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", folder]
        command += ["--no-deps", "--only-binary=:all:", "--platform", PLATFORM]
        command += [f"mlx-metal=={version('mlx')}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheel = next(Path(folder).glob("*.whl"), None)
        if wheel is None:
            reason = (done.stderr.strip().splitlines() or ["no reason"])[-1]
            raise MissingKernelsError(f"mlx-metal cannot be downloaded: {reason}")
        with zipfile.ZipFile(wheel) as package:
            text = package.read(HEADER)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_bytes(text)
    partial.replace(path)
    return path


def compiler() -> str:
    """The compiler of C++."""
    path = shutil.which("g++")
    if path is None:
        raise MissingKernelsError("g++ is not installed")
    return path


def quantized_text() -> str:
    """Part of MLX's header with the kernels for one and few rows."""
    text = header().read_text()
    assert FIRST in text and AFTER in text, f"MLX {version('mlx')} has other kernels in {HEADER}"
    return text[text.index(FIRST) : text.rindex("template <", 0, text.index(AFTER))]


def gated_delta_bodies() -> dict[str, str]:
    """Bodies of mlx-lm's kernels for one gate per head, without a mask, by name."""
    bodies: dict[str, str] = {}

    def record(name: str, source: str, **_: Any) -> None:
        bodies[name] = source

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.metal, "is_available", lambda: True)
        patch.setattr(mx.fast, "metal_kernel", record)
        gated_delta._make_gated_delta_kernel()
        gated_delta._make_gated_delta_kernel_xtree()
        gated_delta._make_gated_delta_packed_kernel()
    return bodies


def _compiled(source: str, included: dict[str, str], macros: dict[str, int]) -> ctypes.CDLL:
    with TemporaryDirectory() as folder:
        for name, text in included.items():
            (Path(folder) / name).write_text(text)
        library = Path(folder) / "kernels.so"
        defined = [f"-D{name}={value}" for name, value in macros.items()]
        command = [compiler(), *FLAGS, *defined, f"-I{folder}", str(SOURCES / source)]
        command += ["-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{source} with MLX {version('mlx')}: {done.stderr}"
        return ctypes.CDLL(str(library))


def _launch(library: ctypes.CDLL, kernel: str, arrays: Sequence[Any], sizes: Sequence[int]) -> None:
    run = library[kernel]
    run.restype = ctypes.c_bool
    contiguous = [np.ascontiguousarray(array) for array in arrays]
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in contiguous]
    if not run(*pointers, *map(ctypes.c_int, sizes)):
        raise RuntimeError(f"{kernel}: only some lanes call a function of their SIMD-group")
