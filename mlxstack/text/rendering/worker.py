"""Child process that renders chat templates under limits, for `rendering`."""

import json
import pickle
import sys
from functools import lru_cache

from mlxstack.text.limited_process import limit_memory, serve, to_parent
from mlxstack.text.rendering.jinja_environment import compiled, free_variables

RENDERED = b"+"
REFUSED = b"-"
"""First byte of an answer: a text follows, or the reason of a refusal."""

MAX_REASON = 500
"""Characters of a refusal: a template may raise an error of any length."""

_compiled = lru_cache(maxsize=8)(compiled)


def answer(request: bytes) -> bytes:
    """Render `(source, variables)`; without variables, list those that the template reads."""
    # Requests come from the parent only; the answer of a stranger's template is no pickle.
    source, variables = pickle.loads(request)
    try:
        if variables is None:
            text = json.dumps(free_variables(source))
        else:
            text = _compiled(source)(**variables)
        kind = RENDERED
    except MemoryError:
        raise
    except Exception as error:
        text = str(error)[:MAX_REASON]
        kind = REFUSED
    return kind + text.encode("utf-8", "surrogatepass")


if __name__ == "__main__":
    limit_memory(int(sys.argv[1]))
    serve(answer, to_parent())
