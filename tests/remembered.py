"""Results that all programs of one run of the tests share, in files of a folder.

Only what follows from a question alone is kept, and only for the run that made it: shapes of
models from their configs, and verdicts of the engine's self-check. Both have tests of their own,
which compute them.
"""

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from xxhash import xxh3_128_hexdigest

Result = TypeVar("Result")

VARIABLE = "TESTS_REMEMBERED"


def _folder() -> Path:
    """That of the first process of this run, which deletes it."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = tempfile.mkdtemp(prefix="remembered-")
        atexit.register(_delete, os.environ[VARIABLE], os.getpid())
    return Path(os.environ[VARIABLE])


def _delete(folder: str, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


FOLDER = _folder()


def remembered(question: object, kind: type[Result], compute: Callable[[], Result]) -> Result:
    """The result of this question, computed if no program of this run has; errors are not kept."""
    file = FOLDER / f"{kind.__name__}-{xxh3_128_hexdigest(repr(question).encode())}"
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        result = compute()
    part = file.with_suffix(f".{os.getpid()}")
    try:
        part.write_bytes(msgspec.json.encode(result))
        part.replace(file)
    except OSError:
        part.unlink(missing_ok=True)
    return result


def answer_shapes() -> None:
    """Be the planner's program that builds models without weights; equal configs are built once."""
    from mlxstack.engine.model import model_shape
    from mlxstack.policy.memory.capacity import ModelShape

    build = model_shape.shape_of_config

    def shape_of_config(config: model_shape.Config) -> ModelShape:
        question = sys.argv[2], msgspec.json.encode(dict(config))
        return remembered(question, ModelShape, lambda: build(config))

    model_shape.shape_of_config = shape_of_config
    model_shape._answer()
