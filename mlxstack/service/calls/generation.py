"""Generation: replies as streams of parts, and the turns of agents."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, aclosing, nullcontext

from msgspec import Struct, structs

from mlxstack.core.conversation import Conversation, Message
from mlxstack.core.engine_events import (
    Event,
    FinishReason,
    PrefillProgress,
    RequestFinished,
    SlotAssigned,
    TokenSampled,
)
from mlxstack.core.errors import Busy, Conflict, NotFound
from mlxstack.core.preset import Anticipation
from mlxstack.core.response_parts import (
    AnswerPart,
    FinishCause,
    GenerationFinished,
    KeepAlive,
    NotedPart,
    PrefillProgressed,
    ResponsePart,
    SpokenPart,
    ToolCallPart,
)
from mlxstack.service.calls import agents
from mlxstack.service.calls.admission import AdmittedRequest, admit
from mlxstack.service.calls.agents import AgentHistory
from mlxstack.service.parts.early_turns import Pause
from mlxstack.service.parts.generation_options import GenerationOptions
from mlxstack.service.parts.openai_messages import assistant_message
from mlxstack.service.service import Service, ServiceHealth
from mlxstack.text.output_format import OutputFormat
from mlxstack.text.output_parser import OutputParser
from mlxstack.text.prompt.answer_replay import AnswerReplay, SampledAnswer, ToolCallReplay

ENDINGS = {
    FinishReason.EOS: FinishCause.EOS,
    FinishReason.LENGTH: FinishCause.LENGTH,
    FinishReason.CONTEXT: FinishCause.CONTEXT,
}


async def stream_response(
    service: Service, admitted: AdmittedRequest, first_s: float, beat_s: float
) -> AsyncGenerator[ResponsePart, None]:
    """Stream the parts of a reply; leaving the iterator cancels the request.

    The first part comes within `first_s` seconds and the next ones within `beat_s`: KeepAlive when
    there is no other. Raises the error that the engine fails with.
    """
    clock = asyncio.get_running_loop().time
    assembler = ResponseAssembler(
        admitted,
        admitted.text_processor.output_format,
        admitted.text_processor.prompt_maker.replay,
        admitted.text_processor.prompt_maker.answers,
    )
    due = clock() + first_s
    spoken: list[SpokenPart] = []
    lock: AbstractContextManager[object] = nullcontext()
    if admitted.request.agent is not None:
        await service.agent_locks.until_no_act(admitted.request.agent)
        lock = await service.agent_locks.lock_request(admitted.request.agent)
    with lock, service.open(admitted.request, admitted.text_processor) as events:
        while not events.is_over:
            event = await events.next(max(0.0, due - clock()))
            parts = assembler.on_event(event)
            if assembler.is_enough:
                events.cancel()
            for part in parts or ([assembler.keep_alive()] if clock() >= due else []):
                if isinstance(part, GenerationFinished):
                    service.stats.n_unparsed_calls += part.n_unparsed
                    await _remember(service, admitted, spoken)
                    _anticipate(service, admitted, assembler.answer, part.slot)
                elif isinstance(part, SpokenPart):
                    spoken.append(part)
                yield part
                due = clock() + beat_s


async def _remember(service: Service, admitted: AdmittedRequest, spoken: list[SpokenPart]) -> None:
    """Record an explicit agent's turn before the client receives its end."""
    agent, conversation = admitted.request.agent, admitted.conversation
    if agent is not None and conversation is not None:
        await agents.record_turn(service, agent, conversation, spoken)


def _anticipate(
    service: Service, admitted: AdmittedRequest, answer: Message | None, slot: int
) -> None:
    """Begin the next turn early, if the answer is complete."""
    spec, conversation = service.preset.prefix_cache, admitted.conversation
    is_wanted = spec.enabled and spec.anticipate is Anticipation.AUTO
    if answer is None or conversation is None or not is_wanted:
        return
    if service.health is ServiceHealth.OK:
        pause = Pause(
            service.generator, admitted.text_processor, admitted.request, conversation, answer, slot
        )
        service.early_turns.note_answer(pause)


class ResponseAssembler:
    """Assembles the parts of one reply from events of the engine.

    `is_enough` requests a cancel: the reply is complete. `answer` is the message of an answer
    that ended by itself and was parsed as a whole, as soon as it has ended.
    """

    def __init__(
        self,
        admitted: AdmittedRequest,
        output_format: OutputFormat,
        replay: ToolCallReplay,
        answers: AnswerReplay | None = None,
    ) -> None:
        self.is_enough = False
        self.answer: Message | None = None
        self._admitted = admitted
        self._options = admitted.options
        self._request = request = admitted.request
        self._anchor = admitted.prompt.anchor
        self._replay = replay
        self._answers = answers
        self._scope = (request.salt, request.display_name or "")
        self._tokens = list(admitted.forced)
        self._spoken: list[SpokenPart] = []
        self._parser = OutputParser(
            output_format,
            lambda: f"{admitted.options.call_prefix}{uuid.uuid4().hex[:24]}",
            tools=admitted.tools,
            stops=admitted.options.stop,
            is_in_thinking=admitted.prompt.is_in_thinking,
            before=admitted.prompt.before,
            is_raw=admitted.is_raw,
            has_grammar=admitted.has_grammar,
        )
        self._opening = [part for token in admitted.forced for part in self._parser.push(token)]
        self._started = SlotAssigned(request.id, slot=-1, n_prompt=len(request.tokens), n_cached=0)
        self._assigned_at = 0.0
        self._n_done = 0
        self._n_tokens = 0
        self._has_call = False
        self._notes: list[TokenSampled] = []

    def on_event(self, event: Event | None) -> list[ResponsePart]:
        """Parts that an event adds. Raises Busy for a cancelled request."""
        match event:
            case TokenSampled():
                return [] if self.is_enough else self._on_token(event)
            case SlotAssigned():
                self._started, self._assigned_at = event, time.monotonic()
                return [event, *self._progress(event.n_cached)]
            case PrefillProgress():
                return self._progress(event.n_done)
            case RequestFinished():
                return self._finish(event)
        return []

    def keep_alive(self) -> KeepAlive:
        """KeepAlive part with the progress of the prompt."""
        return KeepAlive(self._n_done, len(self._request.tokens))

    def _progress(self, n_done: int) -> list[ResponsePart]:
        self._n_done = n_done
        if not self._options.has_progress:
            return []
        elapsed_ms = round((time.monotonic() - self._assigned_at) * 1000)
        return [
            PrefillProgressed(n_done, len(self._request.tokens), self._started.n_cached, elapsed_ms)
        ]

    def _on_token(self, chosen: TokenSampled) -> list[ResponsePart]:
        """Parts of a sampled token; end tokens are not text.

        The first token completes the prompt.
        """
        n_prompt = len(self._request.tokens)
        done = self._progress(n_prompt) if self._n_done < n_prompt else []
        if self._admitted.is_prefill:
            self.is_enough = True
            return done
        self._n_tokens += 1
        if chosen.token not in self._request.eos:
            self._notes.append(chosen)
            self._tokens.append(chosen.token)
        opening, self._opening = self._opening, []
        return [*done, *self._answered([*opening, *self._parser.push(chosen.token)])]

    def _answered(self, parts: Iterable[AnswerPart]) -> list[AnswerPart]:
        """The parts to send, with the tokens sampled since the last ones."""
        answered: list[AnswerPart] = []
        for part in parts:
            if self._options.is_one_call and self._has_call:
                # Only the marks after the one call are still of interest.
                self.is_enough = True
                break
            self._has_call = self._has_call or isinstance(part, ToolCallPart)
            is_noted = isinstance(part, NotedPart)
            answered.append(structs.replace(part, notes=self._take_notes()) if is_noted else part)
        for block in self._parser.blocks:
            self._replay.remember(self._scope, block)
        self._parser.blocks.clear()
        is_last = self._options.is_one_call and self._parser.n_blocks > 0
        self.is_enough = self.is_enough or is_last or self._parser.stop is not None
        if self._anchor is not None:
            self._spoken += [part for part in answered if isinstance(part, SpokenPart)]
        return answered

    def _take_notes(self) -> tuple[TokenSampled, ...]:
        notes, self._notes = tuple(self._notes), []
        return notes

    def _finish(self, finished: RequestFinished) -> list[ResponsePart]:
        is_over = self.is_enough or self._admitted.is_prefill
        parts = [] if is_over else self._answered(self._parser.finish(finished.reason))
        self._remember(finished.reason)
        work = finished.timings
        if is_over:
            work = structs.replace(work, n_generated=self._n_tokens)
        ended = GenerationFinished(
            ending=self._ending(finished.reason),
            work=work,
            slot=self._started.slot,
            n_reasoning=self._parser.n_reasoning,
            stop_string=self._parser.stop,
            notes=self._take_notes(),
            n_unparsed=self._parser.n_unparsed,
        )
        return [*parts, ended]

    def _remember(self, reason: FinishReason) -> None:
        """Keep a complete answer, all of which was parsed, for later prompts."""
        is_complete = reason is FinishReason.EOS or (self.is_enough and self._options.is_one_call)
        is_complete = is_complete and not self._admitted.is_prefill
        anchor = self._anchor
        if anchor is None or self._answers is None or not is_complete:
            return
        if self._parser.stop is None and not self._parser.n_unparsed and not self._parser.is_cut:
            self.answer = assistant_message(self._spoken)
            sampled = SampledAnswer(self.answer, tuple(self._tokens))
            self._answers.remember(self._scope, anchor, sampled)

    def _ending(self, reason: FinishReason) -> FinishCause:
        if self._parser.stop is not None:
            return FinishCause.WORD
        if self.is_enough:
            return FinishCause.LENGTH if self._admitted.is_prefill else FinishCause.EOS
        if reason is FinishReason.CANCELLED:
            raise Busy("the request was cancelled by the service, which may be stopping")
        if reason is FinishReason.LENGTH and self._admitted.may_fill_context:
            return FinishCause.CONTEXT
        return ENDINGS[reason]


class AgentTurnRequest(Struct, frozen=True):
    """Next turn of an agent.

    `conversation` is the whole one, or its addition (`is_added`) to the stored one. `is_patient`
    waits in line instead of being refused.
    """

    conversation: Conversation
    options: GenerationOptions
    is_added: bool = False
    is_patient: bool = False


async def admit_turn(service: Service, agent: str, turn: AgentTurnRequest) -> AdmittedRequest:
    """Admit the turn. Raises as `admit` and `agents.past` do."""
    conversation = turn.conversation
    if turn.is_added:
        before = await _past(service, agent)
        conversation = structs.replace(
            conversation,
            messages=(*before.messages, *conversation.messages),
            tools=conversation.tools or before.tools,
        )
    return await admit(service, conversation, structs.replace(turn.options, agent=agent))


async def stream_turn(
    service: Service,
    agent: str,
    turn: AgentTurnRequest,
    first_s: float,
    beat_s: float,
    on_admitted: Callable[[AdmittedRequest], None],
) -> AsyncGenerator[ResponsePart, None]:
    """Stream the reply in the agent's turn, KeepAlive while waiting.

    Calls `on_admitted` between them. Raises Conflict when the agent is busy and the request is
    not patient.
    """
    if service.agent_locks.is_busy(agent) and not turn.is_patient:
        raise Conflict(
            f"agent {agent} is answering already; wait for the end, or send `queue: true`"
        )
    text_processor = service.text_processor
    with service.agent_locks.joined(agent):
        entering = asyncio.create_task(_enter(service, agent, turn))
        try:
            patience_s = first_s
            while not (await asyncio.wait({entering}, timeout=patience_s))[0]:
                yield KeepAlive(0, 0)
                patience_s = beat_s
            entering.result()
            service.require_model(text_processor)
            admitted = await admit_turn(service, agent, turn)
            on_admitted(admitted)
            async with aclosing(stream_response(service, admitted, first_s, beat_s)) as rest:
                async for part in rest:
                    yield part
        finally:
            entering.cancel()
            if entering.done() and not entering.cancelled() and entering.exception() is None:
                entering.result().close()


async def _enter(service: Service, agent: str, turn: AgentTurnRequest) -> ExitStack:
    """Wait for the agent's turn, across the services of its home.

    Closing the result ends the turn. Raises Conflict when another service has the turn and the
    request is not patient.
    """
    with ExitStack() as held:
        lock = await service.agent_locks.enter(agent)
        held.callback(lock.release)
        locks = service.agent_locks
        acquire = locks.lock_turn if turn.is_patient else locks.lock_turn_now
        held.enter_context(await acquire(agent))
        return held.pop_all()


async def _past(service: Service, agent: str) -> AgentHistory:
    """History of an agent; a new one has none."""
    try:
        return await agents.past(service, agent)
    except NotFound:
        return AgentHistory()
