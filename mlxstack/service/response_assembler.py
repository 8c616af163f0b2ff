"""Turns the engine's events about one ask into the parts of its reply."""

import time
import uuid
from collections.abc import Iterable

from msgspec import Struct, structs

from mlxstack.core.engine_events import (
    Event,
    FinishReason,
    PrefillProgress,
    RequestFinished,
    SlotAssigned,
    TokenSampled,
)
from mlxstack.core.errors import Busy
from mlxstack.core.request import Request
from mlxstack.service.response_parts import (
    ContentPart,
    FinishCause,
    GenerationFinished,
    GenerationStarted,
    KeepAlive,
    PrefillProgressed,
    ReasoningPart,
    ResponsePart,
    TokenLogprob,
    ToolCallPart,
)
from mlxstack.text.output_format import OutputFormat
from mlxstack.text.output_parser import (
    Delta,
    OutputParser,
    ParseOptions,
    ReasoningPiece,
    StopMatched,
    TextPiece,
    ToolCallPiece,
)
from mlxstack.text.tool_call_replay import Scope, ToolCallReplay

ENDINGS = {
    FinishReason.EOS: FinishCause.EOS,
    FinishReason.LENGTH: FinishCause.LENGTH,
    FinishReason.CONTEXT: FinishCause.CONTEXT,
}


class ParseConfig(Struct, frozen=True):
    """How a reply is to be heard.

    `forced` are tokens of the answer that the prompt ends with. `may_fill_context`: the caller
    set no limit below the room that was left. `is_prefill`: only the prompt is to be computed.
    """

    parse_options: ParseOptions
    forced: tuple[int, ...] = ()
    call_prefix: str = "call_"
    may_fill_context: bool = False
    is_one_call: bool = False
    has_progress: bool = False
    is_prefill: bool = False


class ResponseAssembler:
    """Hears one reply. `is_enough` asks to cancel: what the caller wanted has been said."""

    def __init__(
        self,
        request: Request,
        parsing: ParseConfig,
        output_format: OutputFormat,
        replay: ToolCallReplay,
    ) -> None:
        self.is_enough = False
        self._request = request
        self._parsing = parsing
        self._replay = replay
        self._speech = OutputParser(
            output_format,
            parsing.parse_options,
            lambda: f"{parsing.call_prefix}{uuid.uuid4().hex[:24]}",
        )
        for token in parsing.forced:
            self._speech.push(token)
        self._started = GenerationStarted(slot=-1, n_prompt=len(request.tokens), n_cached=0)
        self._seated_at = 0.0
        self._n_done = 0
        self._n_heard = 0
        self._notes: list[TokenLogprob] = []

    def on_event(self, event: Event | None) -> list[ResponsePart]:
        """What the event adds to the reply. Raises Busy when the engine gave the ask up."""
        match event:
            case SlotAssigned():
                return [self._on_slot_assigned(event), *self._progress(event.n_cached)]
            case PrefillProgress():
                return self._progress(event.n_done)
            case TokenSampled() if not self.is_enough:
                return self._on_token(event)
            case RequestFinished():
                return self._finish(event)
        return []

    def keep_alive(self) -> KeepAlive:
        """How far the prompt is, while there is nothing to say."""
        return KeepAlive(self._n_done, len(self._request.tokens))

    def _on_slot_assigned(self, seated: SlotAssigned) -> GenerationStarted:
        self._seated_at, self._n_done = time.monotonic(), seated.n_cached
        self._started = GenerationStarted(
            slot=seated.slot,
            n_prompt=len(self._request.tokens),
            n_cached=seated.n_cached,
            source=seated.source,
            miss=seated.miss,
        )
        return self._started

    def _progress(self, n_done: int) -> list[ResponsePart]:
        self._n_done = n_done
        if not self._parsing.has_progress:
            return []
        elapsed_ms = round((time.monotonic() - self._seated_at) * 1000)
        return [
            PrefillProgressed(n_done, len(self._request.tokens), self._started.n_cached, elapsed_ms)
        ]

    def _on_token(self, chosen: TokenSampled) -> list[ResponsePart]:
        """The first token tells that the prompt is done; the end of a text is no token of it."""
        n_prompt = len(self._request.tokens)
        done = self._progress(n_prompt) if self._n_done < n_prompt else []
        if self._parsing.is_prefill:
            self.is_enough = True
            return done
        self._n_heard += 1
        if chosen.token not in self._request.eos:
            self._notes.append(TokenLogprob(chosen.token, chosen.logprob, chosen.top))
        return [*done, *self._parts(self._speech.push(chosen.token))]

    def _parts(self, deltas: Iterable[Delta]) -> list[ResponsePart]:
        parts: list[ResponsePart] = []
        for delta in deltas:
            match delta:
                case ReasoningPiece():
                    parts.append(ReasoningPart(delta.text, self._take_notes()))
                case TextPiece():
                    parts.append(ContentPart(delta.text, self._take_notes()))
                case ToolCallPiece():
                    parts.append(self._call(delta))
                case StopMatched():
                    self.is_enough = True
            if self.is_enough:
                break
        return parts

    def _call(self, delta: ToolCallPiece) -> ToolCallPart:
        call = delta.call
        if delta.block is not None:
            scope = Scope(self._request.salt, self._request.display_name or "")
            self._replay.remember(scope, delta.block)
        self.is_enough = self._parsing.is_one_call
        assert isinstance(call.arguments, dict)
        return ToolCallPart(call.id, call.name, call.arguments)

    def _take_notes(self) -> tuple[TokenLogprob, ...]:
        notes, self._notes = tuple(self._notes), []
        return notes

    def _finish(self, finished: RequestFinished) -> list[ResponsePart]:
        is_over = self.is_enough or self._parsing.is_prefill
        parts = [] if is_over else self._parts(self._speech.finish(finished.reason))
        work = finished.timings
        if is_over:
            work = structs.replace(work, n_generated=self._n_heard)
        ended = GenerationFinished(
            ending=self._ending(finished.reason),
            work=work,
            slot=self._started.slot,
            n_reasoning=self._speech.n_reasoning,
            stop_string=self._speech.stop,
            notes=self._take_notes(),
            n_unparsed=self._speech.n_unparsed,
        )
        return [*parts, ended]

    def _ending(self, reason: FinishReason) -> FinishCause:
        if self._speech.stop is not None:
            return FinishCause.WORD
        if self.is_enough:
            return FinishCause.LENGTH if self._parsing.is_prefill else FinishCause.EOS
        if reason is FinishReason.CANCELLED:
            raise Busy("the request was cancelled by the service, which may be stopping")
        if reason is FinishReason.LENGTH and self._parsing.may_fill_context:
            return FinishCause.CONTEXT
        return ENDINGS[reason]
