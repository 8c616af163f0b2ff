"""Child process that makes grammars of clients under limits, for `client_grammars`."""

import os
import pickle
import sys

import msgspec

from mlxstack.core.errors import BadRequest
from mlxstack.features.formats.grammar.grammar_text import (
    GrammarJob,
    GrammarText,
    RefusedGrammar,
    grammar_text,
)
from mlxstack.text.limited_process import NICENESS, limit_memory, serve, to_parent


def made(job: GrammarJob) -> GrammarText | RefusedGrammar:
    """Grammar of a job, or the reason why there is none."""
    try:
        return grammar_text(job)
    except MemoryError:
        raise
    except BadRequest as error:
        return RefusedGrammar(error.message, error.param)
    except Exception as error:
        param = "tools" if job.shape is None else job.shape.param
        return RefusedGrammar(f"{param}: this grammar cannot be compiled: {error}", param)


def answer(request: bytes) -> bytes:
    """Do a job of the parent, which alone sends some."""
    return msgspec.msgpack.encode(made(pickle.loads(request)))


if __name__ == "__main__":
    limit_memory(int(sys.argv[1]))
    os.nice(NICENESS)
    serve(answer, to_parent())
