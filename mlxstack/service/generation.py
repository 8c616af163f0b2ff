"""From a conversation to the parts of its reply."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence

from msgspec import Struct, structs

from mlxstack.core.conversation import Conversation
from mlxstack.core.engine_events import SlotAssigned
from mlxstack.core.errors import BadRequest, Busy
from mlxstack.core.request import Priority, Request, SamplingParams
from mlxstack.service import agent_locks, constraints
from mlxstack.service.agents import agents
from mlxstack.service.generation_options import (
    UNLIMITED,
    GenerationOptions,
    ServiceBounds,
    ToolChoiceMode,
    check,
    room,
    sampling,
)
from mlxstack.service.response_assembler import ParseConfig, ResponseAssembler
from mlxstack.service.response_parts import (
    ContentPart,
    GenerationFinished,
    ReasoningPart,
    ResponsePart,
    SpokenPart,
    ToolCallPart,
)
from mlxstack.service.service import Service
from mlxstack.service.text_processor import TextProcessor
from mlxstack.store.agent_locks import AgentLock
from mlxstack.text.grammar.constraint import GrammarConstraint
from mlxstack.text.output_parser import ParseOptions
from mlxstack.text.prompt import Prompt, TokenizeOptions
from mlxstack.text.tool_call_replay import Scope

FORBIDDEN = float("-inf")


class AdmittedRequest(Struct, frozen=True):
    """An admitted request: nothing foreseeable is wrong with it.

    `words` are the text tools of the model whose tokens these are; no other model may answer.
    `conversation` is what it was made of, unless it was made of plain text or tokens.
    """

    request: Request
    parsing: ParseConfig
    words: TextProcessor
    conversation: Conversation | None = None

    @property
    def stop(self) -> tuple[str, ...]:
        """The stop strings of the request."""
        return self.parsing.parse_options.stops


async def admit(
    service: Service, conversation: Conversation, options: GenerationOptions
) -> AdmittedRequest:
    """Render, tokenise, check. Raises BadRequest, TooLong, Busy, Loading."""
    words = service.text_processor
    options = await _with_biases(words, options)
    check(options, _bounds(service))
    prompt = await words.prompt(conversation, _scope(service, conversation, options))
    tools = constraints.required(options, conversation.tools)
    forced = _forced(words, options, prompt, bool(tools))
    opening = constraints.ConstraintInputs(conversation, prompt, forced)
    constraint = await constraints.guide(words, options, opening)
    service.require_model(words)
    parse_options = ParseOptions(
        tools=() if options.tool_choice is ToolChoiceMode.NONE else conversation.tools,
        stops=options.stop,
        is_in_thinking=prompt.is_in_thinking,
        before=prompt.before,
    )
    options = structs.replace(options, is_first_turn=conversation.is_first_turn)
    order = _order(service, prompt, ParseConfig(parse_options, forced), options)
    if options.agent is None:
        name = service.agent_registry.name(conversation, options.session_hint, options.salt)
        service.agent_registry.entitle(name, conversation, options.session_hint)
        order = _named(service, order, structs.replace(options, display_name=name))
    return structs.replace(_guided(service, order, constraint), conversation=conversation)


async def admit_text(
    service: Service, prompt: str | Sequence[int | str], options: GenerationOptions
) -> AdmittedRequest:
    """The same for a raw text or tokens, in whose continuation nothing is a marker."""
    words = service.text_processor
    options = await _with_biases(words, options)
    check(options, _bounds(service))
    made = await words.raw(prompt)
    if not made.tokens:
        raise BadRequest("the prompt is empty; at least one token is needed", "prompt")
    parse_options = ParseOptions(stops=options.stop, before=made.before, is_raw=True)
    constraint = await constraints.text_guide(words, options)
    service.require_model(words)
    return _guided(service, _order(service, made, ParseConfig(parse_options), options), constraint)


async def stream_response(
    service: Service, order: AdmittedRequest, first_s: float, beat_s: float
) -> AsyncGenerator[ResponsePart, None]:
    """The parts as they come; leaving the iterator cancels the ask.

    The first part comes within `first_s` seconds and the next ones within `beat_s`: Quiet when
    there is nothing to say. Raises what the engine fails with.
    """
    clock = asyncio.get_running_loop().time
    assembler = ResponseAssembler(
        order.request, order.parsing, order.words.output_format, order.words.maker.replay
    )
    due = clock() + first_s
    spoken: list[SpokenPart] = []
    lock = AgentLock()
    if order.request.agent is not None:
        await service.lines.until_no_act(order.request.agent)
        lock = await agent_locks.request(service, order.request.agent)
    with lock, service.open(order.request, order.words) as ticket:
        while not ticket.is_over:
            event = await ticket.next(max(0.0, due - clock()))
            if isinstance(event, SlotAssigned):
                service.remember(event, order.request)
            parts = assembler.on_event(event)
            if assembler.is_enough:
                ticket.cancel()
            for part in parts or ([assembler.keep_alive()] if clock() >= due else []):
                if isinstance(part, GenerationFinished):
                    service.n_unparsed += part.n_unparsed
                    await _remember(service, order, spoken)
                elif isinstance(part, ReasoningPart | ContentPart | ToolCallPart):
                    spoken.append(part)
                yield part
                due = clock() + beat_s


async def _remember(service: Service, order: AdmittedRequest, spoken: list[SpokenPart]) -> None:
    """What an explicit agent heard and said is kept, before anybody sees the end of it."""
    agent, conversation = order.request.agent, order.conversation
    if agent is not None and conversation is not None:
        await agents.record_turn(service, agent, conversation, spoken)


def _scope(service: Service, conversation: Conversation, options: GenerationOptions) -> Scope:
    """The calls that were sampled for this very agent or conversation."""
    name = options.agent or service.agent_registry.known_name(
        conversation, options.session_hint, options.salt
    )
    return Scope(options.salt, name or "")


def _order(
    service: Service, prompt: Prompt, parsing: ParseConfig, options: GenerationOptions
) -> AdmittedRequest:
    _refuse_if_full(service)
    if options.agent is not None:
        agents.check_room(service, options.agent)
    tokens = prompt.tokens + parsing.forced
    now = time.monotonic()
    wished = options.max_tokens
    if wished is None:
        wished = service.preset.sampling.max_tokens
    if wished == UNLIMITED:
        wished = None
    # The engine always samples one token; a prefill does not say it.
    is_prefill = wished == 0
    max_tokens = room(len(tokens), 1 if is_prefill else wished, service.n_ctx)
    return AdmittedRequest(
        request=Request(
            id=options.id,
            tokens=tokens,
            max_tokens=max_tokens,
            sampling=_sampling(service, options),
            eos=frozenset() if options.ignore_eos else service.facts.eos,
            slot=options.slot,
            agent=options.agent,
            session_hint=options.session_hint,
            display_name=options.agent or options.display_name,
            is_first_turn=options.is_first_turn,
            priority=_priority(service, options),
            use_cache=options.use_cache,
            checkpoint_positions=prompt.checkpoint_positions,
            salt=options.salt,
            request_id=options.request,
            arrived=now,
            deadline=now + service.preset.queue.timeout_s,
        ),
        parsing=structs.replace(
            parsing,
            call_prefix=options.call_prefix,
            may_fill_context=wished is None or wished > max_tokens,
            is_one_call=options.is_one_call,
            has_progress=options.has_progress,
            is_prefill=is_prefill,
        ),
        words=service.text_processor,
    )


def _named(service: Service, order: AdmittedRequest, options: GenerationOptions) -> AdmittedRequest:
    """Only now that nothing refuses it: the names that are remembered are for who is served."""
    request = structs.replace(
        order.request, display_name=options.display_name, priority=_priority(service, options)
    )
    return structs.replace(order, request=request)


def _guided(
    service: Service, order: AdmittedRequest, constraint: GrammarConstraint | None
) -> AdmittedRequest:
    """What follows a grammar to its end has nothing to say after it."""
    if constraint is None:
        return order
    eos = service.facts.eos if constraint.has_grammar else order.request.eos
    return structs.replace(
        order, request=structs.replace(order.request, constraint=constraint, eos=eos)
    )


def _forced(
    words: TextProcessor, options: GenerationOptions, prompt: Prompt, has_tools: bool
) -> tuple[int, ...]:
    """The beginning of a tool call, when one is required. Raises BadRequest if there is none."""
    if options.tool_choice is not ToolChoiceMode.REQUIRED or not has_tools:
        return ()
    opening = words.output_format.call_opening
    if not opening:
        raise BadRequest(
            "tool_choice: no way is known in which this model writes tool calls, so that none can "
            'be forced; use tool_choice "auto"',
            "tool_choice",
        )
    if prompt.is_in_thinking:
        return (*words.tokenizer.think_end_tokens, *opening)
    return (*words.output_format.message_opening, *opening) if prompt.before else opening


async def _with_biases(words: TextProcessor, options: GenerationOptions) -> GenerationOptions:
    """The options with biases of texts as those of their tokens; special tokens are none."""
    wish = options.sampling
    if not wish.bias_texts:
        return options
    found = list(wish.logit_bias)
    for text, bias in wish.bias_texts:
        tokens = await words.tokenize(text, TokenizeOptions(parse_special=False))
        found += [(token, bias) for token in tokens]
    return structs.replace(
        options, sampling=structs.replace(wish, logit_bias=tuple(found), bias_texts=())
    )


def _sampling(service: Service, options: GenerationOptions) -> SamplingParams:
    """A forbidden tool call is one whose opening mark cannot be chosen.

    An opening of several tokens is up to the guide.
    """
    preset, model = service.preset.sampling, service.facts.defaults
    chosen = sampling(options.sampling, preset, model, service.n_ctx)
    opening = service.text_processor.output_format.call_opening
    if options.tool_choice is not ToolChoiceMode.NONE or len(opening) != 1:
        return chosen
    return structs.replace(chosen, logit_bias=(*chosen.logit_bias, (opening[0], FORBIDDEN)))


def _priority(service: Service, options: GenerationOptions) -> Priority:
    """The endpoint's or the key's, else what somebody gave this agent."""
    record = service.agent_registry.find(options.agent or options.display_name or "")
    if record is None or options.priority is not Priority.NORMAL:
        return options.priority
    return record.priority


def _bounds(service: Service) -> ServiceBounds:
    return ServiceBounds(service.n_ctx, service.preset.slots.count, service.facts.n_vocab)


def _refuse_if_full(service: Service) -> None:
    """The engine has the last word; this one comes before the headers of a stream."""
    n_waiting, limit = len(service.engine.snapshot().waiting), service.preset.queue.max_waiting
    if 0 < limit <= n_waiting:
        raise Busy(f"{n_waiting} requests are waiting already, no more are queued")
