"""Child process that decodes images under limits, for `bounds`."""

import os
import pickle
import sys
import warnings

import msgspec

from mlxstack.text.images.bounds import answer_of
from mlxstack.text.limited_process import NICENESS, limit_memory, serve, to_parent


def answer(request: bytes) -> bytes:
    """Do a job of the parent, which alone sends some."""
    return msgspec.msgpack.encode(answer_of(pickle.loads(request)))


if __name__ == "__main__":
    limit_memory(int(sys.argv[1]))
    os.nice(NICENESS)
    # Pillow warns of each odd tag of EXIF: a picture could fill the log.
    warnings.simplefilter("ignore")
    serve(answer, to_parent())
