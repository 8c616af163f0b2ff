"""Generation: the reply to an admitted request, as a stream of parts."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Iterable
from contextlib import AbstractContextManager, nullcontext

from msgspec import structs

from mlxstack.core.conversation import Conversation, Message, Role, Tool, ToolCall
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
from mlxstack.core.response_parts import (
    AnswerPart,
    ContentPart,
    GenerationFinished,
    KeepAlive,
    NotedPart,
    PrefillProgressed,
    ReasoningPart,
    ResponsePart,
    SpokenPart,
    ToolCallPart,
)
from mlxstack.service.calls import agents
from mlxstack.service.parts.generation_options import GenerationOptions, ToolChoiceMode
from mlxstack.service.parts.service_feature import CompleteAnswer
from mlxstack.service.parts.text_processor import TextProcessor
from mlxstack.service.service import Service, ServiceHealth
from mlxstack.text.prompt.splicer import SampledAnswer
from mlxstack.text.tokens.cached_tokenizer import Prompt


async def stream_response(
    service: Service, generation: "Generation", first_s: float, beat_s: float
) -> AsyncGenerator[ResponsePart, None]:
    """Stream the parts of a reply; leaving the iterator cancels the request.

    The first part comes within `first_s` seconds and the next ones within `beat_s`: KeepAlive when
    there is no other. Raises the error that the engine fails with.
    """
    clock = asyncio.get_running_loop().time
    request = generation.request
    due = clock() + first_s
    reply_parts: list[SpokenPart] = []
    lock: AbstractContextManager[object] = nullcontext()
    if request.agent is not None:
        await service.agent_locks.until_no_act(request.agent)
        lock = await service.agent_locks.lock_request(request.agent)
    with lock, service.open(request, generation.text_processor) as events:
        while not events.is_over:
            event = await events.next(max(0.0, due - clock()))
            parts = generation.on_event(event)
            if generation.is_enough:
                events.cancel()
            for part in parts or ([generation.keep_alive()] if clock() >= due else []):
                if isinstance(part, GenerationFinished):
                    service.stats.n_unparsed_calls += part.n_unparsed
                    await _remember(service, generation, reply_parts)
                    _note_answer(service, generation, part.slot)
                elif isinstance(part, SpokenPart):
                    reply_parts.append(part)
                yield part
                due = clock() + beat_s


def assistant_message(spoken_parts: Iterable[SpokenPart]) -> Message:
    """The parts of a reply as a message, without cut calls."""
    parts = tuple(spoken_parts)
    reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
    calls = (part for part in parts if isinstance(part, ToolCallPart) and not part.is_cut)
    return Message(
        role=Role.ASSISTANT,
        text="".join(part.text for part in parts if isinstance(part, ContentPart)),
        reasoning=reasoning or None,
        tool_calls=tuple(ToolCall(call.id, call.name, call.arguments) for call in calls),
    )


async def _remember(
    service: Service, generation: "Generation", reply_parts: list[SpokenPart]
) -> None:
    """Record an explicit agent's turn before the client receives its end."""
    agent = generation.request.agent
    conversation = generation.conversation
    if agent is not None and conversation is not None:
        await agents.record_turn(service, agent, conversation, assistant_message(reply_parts))


def _note_answer(service: Service, generation: "Generation", slot: int) -> None:
    """Show a complete answer to the features of the service."""
    conversation = generation.conversation
    if generation.answer is None or conversation is None or generation.is_copy:
        return
    if service.health is ServiceHealth.OK:
        answer = CompleteAnswer(
            service.generator,
            generation.text_processor,
            generation.request,
            conversation,
            generation.answer,
            slot,
        )
        for feature in service.features:
            feature.on_answer(answer)


class Generation:
    """Admitted request; parts of its reply from events of the engine."""

    def __init__(
        self,
        request: Request,
        options: GenerationOptions,
        prompt: Prompt,
        text_processor: TextProcessor,
        conversation: Conversation | None = None,
        has_grammar: bool = False,
        is_copy: bool = False,
    ) -> None:
        self.request = request
        self.options = options
        """With the preset's limit of tokens where the request has none."""
        self.prompt = prompt
        self.text_processor = text_processor
        """That of the model whose tokens these are; no other model may answer."""
        self.conversation = conversation
        """Source of the prompt; None for plain text or tokens, whose answers have no calls."""
        self.has_grammar = has_grammar
        """Whether a grammar rules the content."""
        self.is_copy = is_copy
        self.is_enough = False
        """The reply is complete, and the request to be cancelled."""
        self.answer: Message | None = None
        """Answer that has ended by itself and was parsed as a whole."""
        self._prompt_maker = text_processor.prompt_maker
        self._scope = (request.salt, request.display_name or "")
        self._tokens = list(request.tokens[len(prompt.tokens) :])
        self._spoken: list[SpokenPart] = []
        tools: tuple[Tool, ...] = ()
        if conversation is not None and options.tool_choice is not ToolChoiceMode.NONE:
            tools = conversation.tools
        self._parser = text_processor.output_format.parser(
            lambda: f"{options.call_prefix}{uuid.uuid4().hex[:24]}",
            tools=tools,
            stops=options.stop,
            is_in_thinking=prompt.is_in_thinking,
            before=prompt.before,
            is_raw=conversation is None,
            has_grammar=has_grammar,
        )
        self._opening = [part for token in self._tokens for part in self._parser.push(token)]
        self._started = SlotAssigned(request.id, slot=-1, n_prompt=len(request.tokens), n_cached=0)
        self.lookup = asyncio.Event()
        """Set when the request has a slot."""
        self._assigned_at = 0.0
        self._n_done = 0
        self._n_tokens = 0
        self._has_call = False
        self._notes: list[TokenSampled] = []

    @property
    def is_prefill(self) -> bool:
        """Whether only the prompt is computed."""
        return self.options.max_tokens == 0

    @property
    def assigned(self) -> SlotAssigned | None:
        """Slot and reused KV of the request; None while it waits."""
        return self._started if self.lookup.is_set() else None

    @property
    def loose_schemas(self) -> tuple[str, ...]:
        """Parts of the schemas of the request that no grammar enforces."""
        tools: tuple[Tool, ...] = ()
        if self.conversation is not None:
            tools = self.conversation.tools
        return self.text_processor.constraints.unenforced(self.options, tools)

    def copy(self, i: int) -> "Generation":
        """Another answer to the same prompt: another seed, no agent."""
        request = self.request
        sampling = request.sampling
        if sampling.seed is not None:
            sampling = structs.replace(sampling, seed=sampling.seed + i)
        caller = structs.replace(request.caller, agent=None)
        return Generation(
            structs.replace(request, id=f"{request.id}-{i}", caller=caller, sampling=sampling),
            self.options,
            self.prompt,
            self.text_processor,
            self.conversation,
            self.has_grammar,
            is_copy=True,
        )

    def on_event(self, event: Event | None) -> list[ResponsePart]:
        """Parts that an event adds. Raises Busy for a cancelled request."""
        match event:
            case TokenSampled():
                if self.is_enough:
                    return []
                return self._on_token(event)
            case SlotAssigned():
                self._started, self._assigned_at = event, time.monotonic()
                self.lookup.set()
                return [event, *self._progress(event.n_cached)]
            case PrefillProgress():
                return self._progress(event.n_done)
            case RequestFinished():
                return self._finish(event)
        return []

    def keep_alive(self) -> KeepAlive:
        """KeepAlive part with the progress of the prompt."""
        return KeepAlive(self._n_done, len(self.request.tokens))

    def _progress(self, n_done: int) -> list[ResponsePart]:
        self._n_done = n_done
        if not self.options.has_progress:
            return []
        elapsed_ms = round((time.monotonic() - self._assigned_at) * 1000)
        return [
            PrefillProgressed(n_done, len(self.request.tokens), self._started.n_cached, elapsed_ms)
        ]

    def _on_token(self, chosen: TokenSampled) -> list[ResponsePart]:
        """Parts of a sampled token; end tokens are not text.

        The first token completes the prompt.
        """
        n_prompt = len(self.request.tokens)
        done = self._progress(n_prompt) if self._n_done < n_prompt else []
        if self.is_prefill:
            self.is_enough = True
            return done
        self._n_tokens += 1
        if chosen.token not in self.request.eos:
            self._notes.append(chosen)
            self._tokens.append(chosen.token)
        opening = self._opening
        self._opening = []
        return [*done, *self._answered([*opening, *self._parser.push(chosen.token)])]

    def _answered(self, parts: Iterable[AnswerPart]) -> list[AnswerPart]:
        """The parts to send, with the tokens sampled since the last ones."""
        answered: list[AnswerPart] = []
        for part in parts:
            if self.options.is_one_call and self._has_call:
                # Only the marks after the one call are still of interest.
                self.is_enough = True
                break
            self._has_call = self._has_call or isinstance(part, ToolCallPart)
            if isinstance(part, NotedPart):
                answered.append(structs.replace(part, notes=self._take_notes()))
            else:
                answered.append(part)
        if not self.request.drops_kv:
            for block in self._parser.blocks:
                self._prompt_maker.remember_calls(self._scope, block)
        self._parser.blocks.clear()
        is_last = self.options.is_one_call and self._parser.n_blocks > 0
        self.is_enough = self.is_enough or is_last or self._parser.stop is not None
        if self.prompt.answer_at is not None:
            self._spoken += [part for part in answered if isinstance(part, SpokenPart)]
        return answered

    def _take_notes(self) -> tuple[TokenSampled, ...]:
        notes = tuple(self._notes)
        self._notes = []
        return notes

    def _finish(self, finished: RequestFinished) -> list[ResponsePart]:
        is_over = self.is_enough or self.is_prefill
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
            has_cut_call=self._parser.is_cut,
        )
        return [*parts, ended]

    def _remember(self, reason: FinishReason) -> None:
        """Keep a complete answer, all of which was parsed, for later prompts."""
        is_complete = reason is FinishReason.EOS or (self.is_enough and self.options.is_one_call)
        is_short_lived = self.is_prefill or self.request.drops_kv
        if self.prompt.answer_at is None or is_short_lived or not is_complete:
            return
        if self._parser.stop is None and not self._parser.n_unparsed and not self._parser.is_cut:
            self.answer = assistant_message(self._spoken)
            sampled = SampledAnswer(self.answer, tuple(self._tokens))
            self._prompt_maker.remember_answer(self._scope, self.prompt, sampled)

    def _ending(self, reason: FinishReason) -> FinishReason:
        if self._parser.stop is not None:
            return FinishReason.WORD
        if self.is_enough:
            if self.is_prefill:
                return FinishReason.LENGTH
            return FinishReason.EOS
        if reason is FinishReason.CANCELLED:
            raise Busy("the request was cancelled by the service, which may be stopping")
        limit = self.options.max_tokens
        may_fill_context = limit is None or limit > self.request.max_tokens
        if reason is FinishReason.LENGTH and may_fill_context:
            return FinishReason.CONTEXT
        return reason
