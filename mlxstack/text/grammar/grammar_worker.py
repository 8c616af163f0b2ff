"""Child process that compiles grammars under limits, for `grammar_check`.

Its first message is the vocabulary, every other one a grammar; the compiler itself cannot be
interrupted.
"""

import sys

import msgspec
from llguidance import LLMatcher

from mlxstack.text.grammar.vocabulary import VocabularyBytes
from mlxstack.text.limited_process import limit_memory, serve, to_parent


def main() -> None:
    """`python -m mlxstack.text.grammar.grammar_worker BYTES`: compile, within this memory."""
    pipe = to_parent()
    limit_memory(int(sys.argv[1]))
    tokenizer = msgspec.msgpack.decode(pipe.recv_bytes(), type=VocabularyBytes).table()

    def compiled(grammar: bytes) -> bytes:
        LLMatcher(tokenizer, grammar.decode(errors="replace"), log_level=0)
        return b""

    serve(compiled, pipe)


if __name__ == "__main__":
    main()
