"""Checks in a child process that a grammar compiles in bounded time.

llguidance bounds the work of a grammar, except for `multipleOf`: a schema of 200 bytes with
several of them takes minutes and gigabytes, and a thread in it cannot be stopped.
"""

import json
import math
import re
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from contextlib import suppress
from decimal import Decimal
from typing import Any

from msgspec import Struct

from mlxstack.core.errors import BadRequest, Busy

LIMIT_S = 2.0
"""CPU seconds that a grammar may take in the process."""
MAX_MULTIPLE = 10_000
"""Largest `multipleOf`, counted in units of its last decimal place."""
COSTLY = "multipleOf"
VALUES = frozenset({"enum", "const", "default", "example", "examples"})
"""Schema keywords with data as values, where `multipleOf` means nothing."""
MOST_REFUSED = 256
MAX_UNCHECKED = 50_000
"""Maximum characters; an object's compile time grows faster than quadratically."""
CHEAP = re.compile(r'multipleOf\\*": ?1e-10\b')
"""The multiple that bounds the decimal places of every number."""
ESCAPED = re.compile(r"\\+u00([0-9a-fA-F]{2})")


class TokenizerData(Struct, frozen=True):
    """Arguments of an `LLTokenizer`, to make the same one in another process."""

    tokenizer: str
    n_vocab: int
    eos: list[int]


def is_bounded(grammar: str) -> bool:
    """Whether llguidance alone bounds the time that compiling takes."""
    text = ESCAPED.sub(lambda match: chr(int(match[1], 16)), grammar)
    return len(grammar) <= MAX_UNCHECKED and COSTLY not in CHEAP.sub("", text)


def check_multiples(schema: Any, param: str) -> None:
    """Raise BadRequest for a `multipleOf` with too large an automaton."""
    if isinstance(schema, dict):
        _check_multiple(schema.get(COSTLY), param)
        inner = [value for key, value in schema.items() if key not in VALUES]
    else:
        inner = schema
    for one in inner:
        if isinstance(one, dict | list):
            check_multiples(one, param)


def _check_multiple(given: Any, param: str) -> None:
    # Anything but a number is refused by llguidance, or belongs to a property of this name.
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
        return
    _, digits, exponent = Decimal(repr(given)).normalize().as_tuple()
    units = int("".join(map(str, digits))) * 10 ** max(0, int(exponent))
    if units > MAX_MULTIPLE:
        raise BadRequest(
            f"{param}: multipleOf is {given}, which cannot be enforced; without its decimal point "
            f"it may be {MAX_MULTIPLE} at most, as with 0.01 or 5000",
            param,
        )


class GrammarCheck:
    """Compiles grammars of one tokenizer under a time limit. Thread-safe.

    The process is started at the first check, and again after it had to be killed.
    """

    def __init__(self, tokenizer: TokenizerData) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._refused: OrderedDict[str, None] = OrderedDict()

    def check(self, grammar: str, param: str) -> None:
        """Raise BadRequest when compiling `grammar` takes too long, Busy without a process."""
        with self._lock:
            if grammar not in self._refused:
                if self._compiles(grammar):
                    return
                self._refused[grammar] = None
                if len(self._refused) > MOST_REFUSED:
                    self._refused.popitem(last=False)
        raise BadRequest(
            f"{param}: compiling this grammar takes longer than {LIMIT_S:g} s; use a "
            "smaller schema, or fewer and smaller values of multipleOf",
            param,
        )

    def close(self) -> None:
        """End the process."""
        self._end()

    def _compiles(self, grammar: str) -> bool:
        try:
            process = self._running()
            self._send(process, {"grammar": grammar, "limit_s": LIMIT_S})
            assert process.stdout is not None
            if process.stdout.readline():
                return True
        except OSError as error:
            self._end()
            raise Busy(f"the grammar cannot be checked now: {error.strerror}") from error
        self._end()
        return False

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mlxstack.text.grammar_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            weakref.finalize(self, _kill, self._process)
            data = self._tokenizer
            first = {"tokenizer": data.tokenizer, "n_vocab": data.n_vocab, "eos": data.eos}
            self._send(self._process, first)
        return self._process

    def _send(self, process: "subprocess.Popen[bytes]", message: dict[str, Any]) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(message).encode() + b"\n")
        process.stdin.flush()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _kill(process)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    # What was not written yet cannot be any more.
    with suppress(BrokenPipeError), process:
        process.kill()
