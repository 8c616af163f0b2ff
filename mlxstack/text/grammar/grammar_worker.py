"""Child process that compiles grammars under limits, for `grammar_check`.

Its first message is the tokenizer, every other one a grammar; the compiler itself cannot be
interrupted.
"""

import json
import sys

from llguidance import LLMatcher, LLTokenizer

from mlxstack.text.limited_process import limit_memory, serve, to_parent


def main() -> None:
    """`python -m mlxstack.text.grammar.grammar_worker BYTES`: compile, within this memory."""
    pipe = to_parent()
    limit_memory(int(sys.argv[1]))
    tokenizer = LLTokenizer(**json.loads(pipe.recv_bytes()))

    def compiled(grammar: bytes) -> bytes:
        LLMatcher(tokenizer, grammar.decode(errors="replace"), log_level=0)
        return b""

    serve(compiled, pipe)


if __name__ == "__main__":
    main()
