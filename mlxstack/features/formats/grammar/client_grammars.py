"""Grammars of clients' schemas and tools, made in limited processes."""

import hashlib
import pickle
import threading
from collections import OrderedDict

import msgspec
from msgspec.structs import replace

from mlxstack.core.errors import BadRequest, Busy
from mlxstack.features.formats.grammar.forced_tool_call import ForcedCalls
from mlxstack.features.formats.grammar.grammar_text import GrammarJob, GrammarText, RefusedGrammar
from mlxstack.text.grammar.schema_grammar import ResponseConstraint
from mlxstack.text.limited_pool import LimitedPool, PoolLimits
from mlxstack.text.limited_process import Overrun, Stalled

LIMIT_S = 2.0
"""CPU seconds that the grammar of a request may take, and half of those to loosen schemas."""
LOOSENING = 2.0
"""Factor of the limit where schemas of tools are loosened."""
MAX_SENT = 8 * 1024 * 1024
"""Bytes of a job; a grammar has a million characters at most."""
MAX_KNOWN = 256
MAX_BYTES = 32 * 1024 * 1024
"""Bytes of the texts that are remembered."""
PROCESSES = LimitedPool(
    "mlxstack.features.formats.grammar.grammar_worker",
    PoolLimits(
        max_bytes=1024**3,
        quick_s=0.5,
        n_slow=2,
        n_idle=2,
        busy="this grammar takes long to compile, and two of others are compiled now; try again",
    ),
)
"""The processes that make grammars, of all models of this process."""

GrammarResult = GrammarText | RefusedGrammar


class ClientGrammars:
    """Maker and cache of grammar texts. Thread-safe.

    The model has `n_vocab` tokens. Equal jobs are done once; those over a limit of CPU time or
    memory are refused again at once.
    """

    def __init__(self, n_vocab: int) -> None:
        self._n_vocab = n_vocab
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, GrammarResult] = OrderedDict()
        self._n_bytes = 0

    def of_shape(self, shape: ResponseConstraint) -> GrammarText:
        """Grammar of a response format. Raises BadRequest, Busy."""
        job = GrammarJob(self._n_vocab, LIMIT_S / 2, shape=shape)
        return self._done(job, shape.param, LIMIT_S)

    def of_calls(self, calls: ForcedCalls) -> GrammarText:
        """Grammar of tool calls; odd schemas are loosened. Raises BadRequest, Busy."""
        bare = tuple(replace(tool, description="") for tool in calls.tools)
        job = GrammarJob(self._n_vocab, LIMIT_S, calls=replace(calls, tools=bare))
        try:
            return self._done(job, "tools", LIMIT_S)
        except BadRequest as error:
            if error.param != "tools":
                raise
            return self._done(replace(job, is_loose=True), "tools", LOOSENING * LIMIT_S)

    def _done(self, job: GrammarJob, param: str, limit_s: float) -> GrammarText:
        try:
            payload = pickle.dumps(job, pickle.HIGHEST_PROTOCOL)
        except RecursionError:
            raise BadRequest(f"{param}: the schema is too deep", param) from None
        if len(payload) > MAX_SENT:
            raise BadRequest(
                f"{param}: the schemas have {len(payload)} bytes, at most {MAX_SENT} are compiled",
                param,
            )
        key = hashlib.blake2b(payload, digest_size=16).digest()
        with self._lock:
            result = self._known.get(key)
            if result is not None:
                self._known.move_to_end(key)
        if result is None:
            result = self._compiled(payload, param, limit_s)
            self._remember(key, result)
        if isinstance(result, RefusedGrammar):
            raise BadRequest(result.message, result.param)
        return result

    def _compiled(self, payload: bytes, param: str, limit_s: float) -> GrammarResult:
        try:
            answer, _ = PROCESSES.request(payload, limit_s)
        except Stalled:
            raise Busy("this grammar was not compiled in time; try again") from None
        except Overrun as overrun:
            return RefusedGrammar(
                f"{param}: compiling this grammar {overrun}; use a smaller schema, or fewer and "
                "smaller values of multipleOf",
                param,
            )
        except OSError as error:
            raise Busy(f"the grammar cannot be compiled now: {error.strerror}") from error
        result: GrammarResult = msgspec.msgpack.decode(answer, type=GrammarResult)
        return result

    def _remember(self, key: bytes, result: GrammarResult) -> None:
        with self._lock:
            if key not in self._known:
                self._n_bytes += _size(result)
            self._known[key] = result
            while len(self._known) > MAX_KNOWN or self._n_bytes > MAX_BYTES:
                self._n_bytes -= _size(self._known.popitem(last=False)[1])


def _size(result: GrammarResult) -> int:
    if isinstance(result, GrammarText):
        return len(result.text)
    return len(result.message)
