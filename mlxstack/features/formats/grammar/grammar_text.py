"""Grammar of a client's schemas and tools, made in a child process.

Conversions and compilers take as long as a schema makes them, and a thread in one of them cannot be
ended. So `grammar_worker` calls these, and the service compiles what has compiled there.
"""

import time
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.errors import BadRequest
from mlxstack.features.formats.grammar.forced_tool_call import ForcedCalls, call_grammar
from mlxstack.features.formats.grammar.loose_tools import ToolLoosener, anywhere, not_objects
from mlxstack.features.formats.grammar.tool_inputs import with_patterns
from mlxstack.text.grammar.compile_messages import error_reason, warned_keywords
from mlxstack.text.grammar.enforceable import enforceable
from mlxstack.text.grammar.enforced_schema import without_grammar
from mlxstack.text.grammar.grammar_check import is_bounded
from mlxstack.text.grammar.schema_grammar import ResponseConstraint, grammar_of, schema_grammar

N_BYTES = 256


class GrammarJob(Struct, frozen=True):
    """Request for the grammar of a `shape` or of `calls`.

    The model has `n_vocab` tokens. With `is_loose`, schemas of tools are loosened. A search for
    parts to leave out or to blame takes `probing_s` CPU seconds at most.
    """

    n_vocab: int
    probing_s: float
    shape: ResponseConstraint | None = None
    calls: ForcedCalls | None = None
    is_loose: bool = False


class GrammarText(Struct, frozen=True, tag=True):
    """Grammar for llguidance, and paths of unenforced schema parts."""

    text: str
    loose: tuple[str, ...] = ()


class RefusedGrammar(Struct, frozen=True, tag=True):
    """Reason for no grammar; `param` is the field of the request."""

    message: str
    param: str | None


class SpelledBytes:
    """Vocabulary of all bytes, and of ids without a text.

    Grammars compile with it as with a model's own: they name ids, and spell texts.
    """

    def __init__(self, n_vocab: int) -> None:
        n_known = max(n_vocab, N_BYTES + 1)
        self.tokens = [bytes([byte]) for byte in range(N_BYTES)]
        self.tokens += [b"\xff<\xef\xb7\x90%d>" % token for token in range(N_BYTES, n_known)]
        self.eos_token_id = n_known - 1
        self.bos_token_id = None
        self.special_token_ids: list[int] = []

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of a text."""
        return list(text)


class GrammarProbe:
    """Tries grammars for a number of CPU seconds of this process."""

    def __init__(self, table: LLTokenizer, seconds: float) -> None:
        self._table = table
        self._ends = time.process_time() + seconds

    def is_over(self) -> bool:
        """Whether no more grammars are tried."""
        return time.process_time() > self._ends

    def problem(self, grammar: str) -> str | None:
        """Reason why a grammar does not compile.

        None where it does; "" for one that may take long, and for all when the time is over.
        """
        if self.is_over() or not is_bounded(grammar):
            return ""
        matcher = LLMatcher(self._table, grammar, log_level=0)
        if matcher.is_error():
            return error_reason(matcher)
        return None


@lru_cache(2)
def _table(n_vocab: int) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(SpelledBytes(n_vocab)))


_LOOSENER = ToolLoosener()


def grammar_text(job: GrammarJob) -> GrammarText:
    """Grammar of a job. Raises BadRequest."""
    if job.shape is not None:
        return _shape_text(job, job.shape)
    assert job.calls is not None
    return _call_text(job, job.calls)


def _shape_text(job: GrammarJob, shape: ResponseConstraint) -> GrammarText:
    try:
        text = grammar_of(shape)
        keywords = warned_keywords(_compiled(job, text, shape.param))
    except BadRequest as error:
        if shape.schema is None:
            raise
        raise _blamed(job, shape.schema, error) from None
    keywords |= without_grammar(shape.schema)
    return GrammarText(text, anywhere(shape.param, keywords))


def _call_text(job: GrammarJob, calls: ForcedCalls) -> GrammarText:
    tools, left_out = with_patterns(calls.tools)
    loose = (*not_objects(calls.tools), *left_out)
    asked = replace(calls, tools=tools)
    if job.is_loose:
        probe = GrammarProbe(_table(job.n_vocab), job.probing_s)
        asked, left_out = _LOOSENER.loosened(asked, probe.problem, probe.is_over)
        loose += left_out
    grammar = call_grammar(asked)
    keywords = warned_keywords(_compiled(job, grammar.text, "tools")) | grammar.unenforced
    return GrammarText(grammar.text, (*loose, *anywhere("tools", keywords)))


def _compiled(job: GrammarJob, text: str, param: str) -> LLMatcher:
    """Matcher of a grammar. Raises BadRequest with what is wrong with it."""
    matcher = LLMatcher(_table(job.n_vocab), text, log_level=0)
    if matcher.is_error():
        raise BadRequest(f"{param}: {error_reason(matcher)}", param)
    return matcher


def _blamed(job: GrammarJob, schema: dict[str, Any], error: BadRequest) -> BadRequest:
    """Error of a schema with message and place of its first fault."""
    param = error.param or "schema"
    probe = GrammarProbe(_table(job.n_vocab), job.probing_s)

    def problem(part: Any) -> str | None:
        try:
            reason = probe.problem(schema_grammar(part, param))
        except BadRequest as refusal:
            return refusal.message
        if reason:
            return f"{param}: {reason}"
        return reason

    left_out = enforceable(schema, problem, probe.is_over).left_out
    blamed = next((part for part in left_out if part.reason), None)
    if blamed is None:
        return error
    return BadRequest(
        f"{blamed.reason}; this is at {blamed.path} of the schema: change it or leave it out",
        error.param,
    )
