"""Compiler and cache of llguidance grammars for one tokenizer."""

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from transformers import PreTrainedTokenizerFast

from mlxstack.core.errors import BadRequest
from mlxstack.text.grammar.grammar_check import GrammarCheck, is_bounded
from mlxstack.text.grammar.vocabulary import VocabularyBytes, text_encoder, vocabulary_bytes

MOST_KNOWN = 64
MOST_BYTES = 64 * 1024 * 1024
"""Estimated memory of the compiled grammars that are kept."""
# Measured with llguidance 1.7: large enums take 70 bytes per character, large automata 50 MB for
# each second of compiling.
BYTES_PER_CHAR = 70
BYTES_PER_S = 50_000_000
PROBING_S = 2.0
"""CPU seconds of one search for the enforceable part of a schema."""
LEFT_OUT = "Unimplemented keys: "
"""Beginning of a warning of llguidance, before a JSON list and perhaps ` (2 times)`."""
APPROXIMATED = {
    "oneOf not fully supported": ("oneOf",),
    "min/maxProperties only supported": ("maxProperties", "minProperties"),
}
"""Beginnings of other warnings, and the keywords that they are about."""
MAX_REASON = 400
"""Characters of a message of llguidance."""


class GrammarCompiler:
    """Callable by any thread; compiling lets the others run.

    llguidance bounds the work of most grammars, when they are compiled and for every token. The
    others are compiled in another process first, under a time limit. `n_bytes` is an estimate of
    the memory of those that are remembered.
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
        self._check: GrammarCheck | None = None

    def needs_check(self, grammar: str) -> bool:
        """Whether `compile` may wait for the other process, for seconds."""
        with self._lock:
            is_known = grammar in self._known
        return not is_known and not is_bounded(grammar)

    def compile(self, grammar: str, param: str) -> LLMatcher | None:
        """Matcher of a grammar; None for an unsupported tokenizer.

        Raises BadRequest with what is wrong with it.
        """
        tokenizer = self.load()
        if tokenizer is None:
            return None
        matcher = self._matcher(tokenizer, grammar, param)
        if matcher.is_error():
            raise BadRequest(f"{param}: {error_reason(matcher)}", param)
        return matcher

    def probe(self) -> Callable[[str], str | None]:
        """Function that returns the reason why a grammar does not compile.

        None where it does; "" for a grammar that may take long, and for all once the calling
        thread has worked for `PROBING_S`.
        """
        tokenizer = self.load()
        ends = time.thread_time() + PROBING_S

        def problem(grammar: str) -> str | None:
            if tokenizer is None or time.thread_time() > ends or not is_bounded(grammar):
                return ""
            matcher = LLMatcher(tokenizer, grammar, log_level=0)
            return error_reason(matcher) if matcher.is_error() else None

        return problem

    def close(self) -> None:
        """End the process that checks grammars, if one was needed."""
        if self._check is not None:
            self._check.close()

    def _matcher(self, tokenizer: LLTokenizer, grammar: str, param: str) -> LLMatcher:
        with self._lock:
            known = self._known.get(grammar)
            if known is not None:
                self._known.move_to_end(grammar)
                return known[0]
        if not is_bounded(grammar):
            self._checker().check(grammar, param)
        began = time.thread_time()
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        took_s = time.thread_time() - began
        n_bytes = len(grammar) * BYTES_PER_CHAR + int(took_s * BYTES_PER_S)
        with self._lock:
            if grammar in self._known:
                return matcher
            self._known[grammar] = matcher, n_bytes
            self.n_bytes += n_bytes
            while len(self._known) > MOST_KNOWN or self.n_bytes > MOST_BYTES:
                self.n_bytes -= self._known.popitem(last=False)[1][1]
        return matcher

    def _checker(self) -> GrammarCheck:
        with self._lock:
            if self._check is None:
                self._check = GrammarCheck(self._vocabulary())
            return self._check

    def _vocabulary(self) -> VocabularyBytes:
        return vocabulary_bytes(self._tokenizer, self.n_vocab)

    def load(self) -> LLTokenizer | None:
        """Table of the vocabulary, made at the first call, in seconds."""
        with self._lock:
            if self._vocabulary_table is None and self._is_able:
                inner = getattr(self._tokenizer, "_tokenizer", self._tokenizer)
                self._is_able = isinstance(inner, PreTrainedTokenizerFast)
                if self._is_able:
                    encode = text_encoder(self._tokenizer)
                    self._vocabulary_table = self._vocabulary().table(encode)
            return self._vocabulary_table


def warned_keywords(rules: LLMatcher) -> set[str]:
    """Keywords of schemas that llguidance reports as not enforced."""
    keywords: set[str] = set()
    for warning in rules.get_grammar_warnings():
        keywords |= _keywords_of(warning)
    return keywords


def _keywords_of(warning: str) -> set[str]:
    if warning.startswith(LEFT_OUT):
        keywords, _ = json.JSONDecoder().raw_decode(warning, len(LEFT_OUT))
        return set(keywords)
    for beginning, approximated in APPROXIMATED.items():
        if warning.startswith(beginning):
            return set(approximated)
    return set()


def error_reason(rules: LLMatcher) -> str:
    """Message of llguidance without the state of its parser and the grammar."""
    reason = rules.get_error().partition("<state>")[0].partition("\n\n")[0]
    return reason.partition("; following special tokens")[0].strip()[:MAX_REASON]
