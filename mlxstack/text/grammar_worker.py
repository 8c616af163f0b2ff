"""Child process that compiles grammars under a CPU limit, for `grammar_check`.

It reads lines of JSON: first the tokenizer, then one grammar after the other. It answers each
with a line, unless the kernel kills it, since the compiler itself cannot be interrupted.
"""

import json
import signal
import sys
from collections.abc import Iterable
from typing import IO

from llguidance import LLMatcher, LLTokenizer


def serve(requests: Iterable[bytes], answers: IO[bytes]) -> None:
    """Compile every grammar of `requests` until the service ends."""
    lines = iter(requests)
    first = json.loads(next(lines))
    tokenizer = LLTokenizer(first["tokenizer"], n_vocab=first["n_vocab"], eos_token=first["eos"])
    for line in lines:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["limit_s"])
        LLMatcher(tokenizer, request["grammar"], log_level=0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(b"{}\n")
        answers.flush()


if __name__ == "__main__":
    # The default action of the timer's signal ends the process, also inside the compiler.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    # Ctrl-C in a terminal reaches the whole group; the service decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(sys.stdin.buffer, sys.stdout.buffer)
