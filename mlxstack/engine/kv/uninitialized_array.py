"""Memory of MLX that nobody has touched yet."""

from io import BytesIO, RawIOBase
from typing import Any

import mlx.core as mx
from numpy.lib import format as npy

from mlxstack.engine import buffer_cache


class _Blank(RawIOBase):
    """A file of one array in the npy format, of which only the header is there."""

    def __init__(self, n_bytes: int) -> None:
        header = BytesIO()
        about = {"descr": "|u1", "fortran_order": False, "shape": (n_bytes,)}
        npy.write_array_header_1_0(header, about)
        self._header = header.getvalue()
        self._at = 0

    def readinto(self, buffer: Any) -> int:
        part = self._header[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(buffer)
        return len(buffer)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset if whence == 0 else self._at + offset
        return self._at


def unfilled(n_bytes: int) -> mx.array:
    """Evaluated bytes (n_bytes,) with whatever was in their memory before.

    `mx.zeros` touches every page of fresh memory, which takes as long as reading a file into it.
    MLX has no other array but a loaded one whose first writer is the caller.
    """
    blank: Any = _Blank(n_bytes)
    with buffer_cache.LOADING:
        array = mx.load(blank, format="npy")
        assert isinstance(array, mx.array)
        mx.eval(array)
        # The stream's thread lets go of the Python object last, which needs the GIL too.
        mx.synchronize(mx.default_stream(mx.cpu))
    return array
