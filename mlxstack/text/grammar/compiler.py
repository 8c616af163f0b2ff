"""Compiler and cache of llguidance grammars for one tokenizer."""

import threading
import time
from collections import OrderedDict
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from transformers import PreTrainedTokenizerFast

from mlxstack.core.errors import BadRequest
from mlxstack.text.grammar.compile_messages import error_reason
from mlxstack.text.grammar.vocabulary import text_encoder, vocabulary_bytes

MAX_KNOWN = 64
MAX_BYTES = 64 * 1024 * 1024
"""Estimated memory of the compiled grammars that are kept."""
# Measured with llguidance 1.7: large enums take 70 bytes per character, large automata 50 MB for
# each second of compiling.
BYTES_PER_CHAR = 70
BYTES_PER_S = 50_000_000


class GrammarCompiler:
    """Callable by any thread; compiling lets the others run.

    A grammar of a client has compiled in a limited process before (`client_grammars`). `n_bytes` is
    an estimate of the memory of those that are remembered.
    """

    def __init__(self, tokenizer: Any, n_vocab: int) -> None:
        self._tokenizer = tokenizer
        self.n_vocab = n_vocab
        self._lock = threading.Lock()
        self._vocabulary_table: LLTokenizer | None = None
        self._is_able = True
        # A compiled grammar, and an estimate of its memory in bytes.
        self._known: OrderedDict[str, tuple[LLMatcher, int]] = OrderedDict()
        self.n_bytes = 0

    def compile(self, grammar: str, param: str) -> LLMatcher | None:
        """Matcher of a grammar; None for an unsupported tokenizer.

        Raises BadRequest with what is wrong with it.
        """
        tokenizer = self.load()
        if tokenizer is None:
            return None
        matcher = self._matcher(tokenizer, grammar)
        if matcher.is_error():
            raise BadRequest(f"{param}: {error_reason(matcher)}", param)
        return matcher

    def _matcher(self, tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
        with self._lock:
            cached = self._known.get(grammar)
            if cached is not None:
                self._known.move_to_end(grammar)
                return cached[0]
        began = time.thread_time()
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        took_s = time.thread_time() - began
        n_bytes = len(grammar) * BYTES_PER_CHAR + int(took_s * BYTES_PER_S)
        with self._lock:
            if grammar in self._known:
                return matcher
            self._known[grammar] = matcher, n_bytes
            self.n_bytes += n_bytes
            while len(self._known) > MAX_KNOWN or self.n_bytes > MAX_BYTES:
                self.n_bytes -= self._known.popitem(last=False)[1][1]
        return matcher

    def load(self) -> LLTokenizer | None:
        """Table of the vocabulary, made at the first call, in seconds."""
        with self._lock:
            if self._vocabulary_table is None and self._is_able:
                inner = getattr(self._tokenizer, "_tokenizer", self._tokenizer)
                self._is_able = isinstance(inner, PreTrainedTokenizerFast)
                if self._is_able:
                    encode = text_encoder(self._tokenizer)
                    self._vocabulary_table = vocabulary_bytes(self._tokenizer, self.n_vocab).table(
                        encode
                    )
            return self._vocabulary_table
