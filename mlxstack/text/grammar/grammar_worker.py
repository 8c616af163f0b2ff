"""Child process that compiles grammars under limits, for `grammar_check`.

Its first message is the tokenizer, every other one a grammar; the compiler itself cannot be
interrupted.
"""

import json
import sys

from llguidance import LLMatcher, LLTokenizer

from mlxstack.text.limited_process import limit_memory, read_frame, serve


def main() -> None:
    """`python -m mlxstack.text.grammar.grammar_worker BYTES`: compile, within this memory."""
    first = read_frame(sys.stdin.buffer)
    if first is None:
        return
    limit_memory(int(sys.argv[1]))
    data = json.loads(first[1])
    tokenizer = LLTokenizer(data["tokenizer"], n_vocab=data["n_vocab"], eos_token=data["eos"])

    def compiled(grammar: bytes) -> bytes:
        LLMatcher(tokenizer, grammar.decode(errors="replace"), log_level=0)
        return b""

    serve(compiled)


if __name__ == "__main__":
    main()
