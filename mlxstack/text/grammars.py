"""Compiles grammars for one tokenizer, and remembers the last ones."""

import threading
from collections import OrderedDict
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer

from mlxstack.core.errors import BadRequest

MOST_KNOWN = 64


class Grammars:
    """Callable by any thread; compiling lets the others run.

    llguidance bounds the work of a grammar, when it is compiled and for every token, by default.
    """

    def __init__(self, tokenizer: Any, n_vocab: int) -> None:
        self._tokenizer = tokenizer
        self.n_vocab = n_vocab
        self._lock = threading.Lock()
        self._words: LLTokenizer | None = None
        self._is_able = True
        self._known: OrderedDict[str, LLMatcher] = OrderedDict()

    def compile(self, candidates: tuple[str, ...], param: str) -> LLMatcher | None:
        """The first grammar that can be enforced; None if this tokenizer cannot be guided.

        Raises BadRequest with what is wrong with the first one, if none can.
        """
        words = self._load()
        if words is None:
            return None
        problem = ""
        for grammar in candidates:
            matcher = self._matcher(words, grammar)
            if not matcher.is_error():
                return matcher
            problem = problem or matcher.get_error()
        raise BadRequest(f"{param}: {problem.strip()}", param)

    def _matcher(self, words: LLTokenizer, grammar: str) -> LLMatcher:
        with self._lock:
            known = self._known.get(grammar)
            if known is not None:
                self._known.move_to_end(grammar)
                return known
        made = LLMatcher(words, grammar, log_level=0)
        with self._lock:
            self._known[grammar] = made
            while len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)
        return made

    def _load(self) -> LLTokenizer | None:
        """Reading the vocabulary takes a second for a large one, so it waits for the first use."""
        with self._lock:
            if self._words is None and self._is_able:
                inner = getattr(self._tokenizer, "_tokenizer", self._tokenizer)
                eos = sorted(self._tokenizer.eos_token_ids)
                try:
                    self._words = from_tokenizer(inner, n_vocab=self.n_vocab, eos_token=eos)
                except ValueError:
                    self._is_able = False
            return self._words
