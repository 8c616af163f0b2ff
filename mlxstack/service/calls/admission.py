"""Admission of requests: options checked, prompt tokenized, output constrained.

Those of an explicit agent wait for its turn before.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, aclosing

from msgspec import Struct, structs

from mlxstack.core.conversation import Conversation, Role
from mlxstack.core.errors import BadRequest, Busy, Conflict, NotFound, TooLong
from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.core.request import PERSON_TURN, UNLIMITED, Caller, Request, TurnReading
from mlxstack.core.response_parts import KeepAlive, ResponsePart
from mlxstack.policy.scheduling.scheduler import turn_priority
from mlxstack.service.calls import agents
from mlxstack.service.calls.generation import Generation, stream_response
from mlxstack.service.calls.predicted_answer import predicted_tokens
from mlxstack.service.parts.answer_constraint import AnswerConstraint, check_tool_choice
from mlxstack.service.parts.generation_options import GenerationOptions
from mlxstack.service.parts.text_processor import RawPrompt, TextProcessor
from mlxstack.service.service import Service
from mlxstack.text.prompt.prompt import TokenizeOptions
from mlxstack.text.tokens.cached_tokenizer import Prompt


class AgentTurnRequest(Struct, frozen=True):
    """Next turn of an agent."""

    conversation: Conversation
    options: GenerationOptions
    is_added: bool = False
    """The conversation is an addition to the stored one."""
    is_patient: bool = False
    """It waits in line instead of being refused."""


async def admit(
    service: Service, conversation: Conversation, options: GenerationOptions
) -> Generation:
    """Render, tokenize, check. Raises BadRequest, TooLong, Busy, Loading."""
    text_processor = service.text_processor
    options = await _resolved(service, text_processor, options)
    check_tool_choice(options, conversation.tools)
    options = _with_turn(service, options, conversation)
    caller = options.caller
    name = caller.agent or service.agent_registry.expected_name(
        conversation, caller.session_hint, caller.salt
    )
    settings = service.agent_registry.settings(name)
    options = structs.replace(options, max_context=settings.max_context)
    for feature in service.features:
        conversation, options = feature.with_defaults(
            text_processor, settings, conversation, options
        )
    with service.generator.announced():
        prompt = await text_processor.prompt(conversation, (caller.salt, name))
    if prompt.before:
        conversation = structs.replace(conversation, continue_final=True)
    constraint = await text_processor.constraints.of_answer(options, conversation, prompt)
    prediction: tuple[int, ...] = ()
    if options.predicted_text:
        prediction = await predicted_tokens(service, text_processor, options)
    service.require_model(text_processor)
    request = _request(service, options, prompt, constraint, conversation, prediction)
    return Generation(request, options, prompt, text_processor, conversation, constraint.has_format)


async def admit_turn(service: Service, agent: str, turn: AgentTurnRequest) -> Generation:
    """Admit the turn. Raises as `admit` and `agents.past` do."""
    conversation = turn.conversation
    if turn.is_added:
        before = await _past(service, agent)
        conversation = structs.replace(
            conversation,
            messages=(*before.messages, *conversation.messages),
            tools=conversation.tools or before.tools,
        )
    caller = structs.replace(turn.options.caller, agent=agent)
    return await admit(service, conversation, structs.replace(turn.options, caller=caller))


async def stream_turn(
    service: Service,
    agent: str,
    turn: AgentTurnRequest,
    first_s: float,
    beat_s: float,
    on_admitted: Callable[[Generation], None],
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
            generation = await admit_turn(service, agent, turn)
            on_admitted(generation)
            async with aclosing(stream_response(service, generation, first_s, beat_s)) as parts:
                async for part in parts:
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


async def _past(service: Service, agent: str) -> Conversation:
    """History of an agent; a new one has none."""
    try:
        return await agents.past(service, agent)
    except NotFound:
        return Conversation(())


async def admit_text(service: Service, prompt: RawPrompt, options: GenerationOptions) -> Generation:
    """Admit a raw text or tokens, whose continuation has no markers.

    Errors name the field `prompt`.
    """
    try:
        return await _admit_text(service, prompt, options)
    except TooLong as error:
        error.param = "prompt"
        raise


async def _admit_text(
    service: Service, prompt: RawPrompt, options: GenerationOptions
) -> Generation:
    text_processor = service.text_processor
    options = await _resolved(service, text_processor, options)
    options = _with_turn(service, options)
    max_context = service.agent_registry.settings(options.caller.agent).max_context
    options = structs.replace(options, max_context=max_context)
    with service.generator.announced():
        tokenized = await text_processor.raw(prompt)
    if not tokenized.tokens:
        raise BadRequest("the prompt is empty; at least one token is needed", "prompt")
    constraint = await text_processor.constraints.of_text(options)
    service.require_model(text_processor)
    request = _request(service, options, tokenized, constraint)
    return Generation(request, options, tokenized, text_processor)


def _limit(service: Service, options: GenerationOptions) -> int | None:
    """Maximum tokens by the request or the preset; None without one."""
    limit = options.max_tokens
    if limit is None:
        limit = service.preset.sampling.max_tokens
    return None if limit == UNLIMITED else limit


def _n_ctx(service: Service, options: GenerationOptions) -> int:
    """Maximum tokens of prompt and answer, by slots and agent."""
    if options.max_context is None:
        return service.n_ctx
    return min(options.max_context, service.n_ctx)


def _request(
    service: Service,
    options: GenerationOptions,
    prompt: Prompt,
    constraint: AnswerConstraint,
    conversation: Conversation | None = None,
    prediction: tuple[int, ...] = (),
) -> Request:
    """The request, named after everything that can refuse it. Raises Busy, TooLong."""
    _refuse_if_full(service)
    caller = options.caller
    if caller.agent is not None:
        agents.check_room(service, caller.agent)
        if conversation is not None:
            agents.check_history(caller.agent, conversation)
    prompt_tokens: PromptTokens = prompt
    if constraint.opening:
        prompt_tokens = prompt.extended(constraint.opening)
    # The engine always samples one token; a prefill does not return it.
    limit = 1 if options.max_tokens == 0 else options.max_tokens
    max_tokens = room(len(prompt_tokens.tokens), limit, _n_ctx(service, options))
    now = time.monotonic()
    name = caller.agent
    if conversation is not None and name is None and not options.drops_kv:
        name = service.agent_registry.name(conversation, caller.session_hint, caller.salt)
        service.agent_registry.entitle(name, conversation, caller.session_hint)
    messages = conversation.messages if conversation else None
    return Request(
        id=options.id,
        prompt=prompt_tokens,
        max_tokens=max_tokens,
        sampling=service.text_processor.constraints.sampling(options),
        # A grammar that has ended ends the answer.
        eos=frozenset() if options.ignore_eos and not constraint.has_end else service.facts.eos,
        caller=_ranked(service, name, caller),
        slot=options.slot,
        display_name=name,
        is_first_turn=messages is not None and all(m.role is not Role.ASSISTANT for m in messages),
        use_cache=options.use_cache,
        drops_kv=bool(options.drops_kv),
        prediction=prediction,
        constraint=constraint.grammar,
        thinking=options.thinking,
        thought_end=constraint.thought_end,
        stop_loops=options.stop_loops,
        repeated_call=options.repeated_call,
        arrived=now,
        deadline=now + service.preset.queue.timeout_s,
    )


async def _resolved(
    service: Service, text_processor: TextProcessor, options: GenerationOptions
) -> GenerationOptions:
    """Options with the preset's limit, and biases of tokens only.

    Special tokens in texts get none. Raises BadRequest for options that cannot work.
    """
    biases = list(options.sampling.logit_bias)
    for text, bias in options.bias_texts:
        tokens = await text_processor.tokenize(text, TokenizeOptions(parse_special=False))
        biases += [(token, bias) for token in tokens]
    chosen = structs.replace(options.sampling, logit_bias=tuple(biases))
    limit = _limit(service, options)
    options = structs.replace(options, sampling=chosen, bias_texts=(), max_tokens=limit)
    check(options, service.preset.slots.count, service.facts.n_vocab)
    return options


def _with_turn(
    service: Service, options: GenerationOptions, conversation: Conversation | None = None
) -> GenerationOptions:
    """The options with kind of turn and use of KV.

    One that drops its KV belongs to no agent. By its kind alone that of no agent and no pinned slot
    is dropped.
    """
    caller = options.caller
    reading = _read_turn(service, conversation, options)
    drops_kv = options.drops_kv
    if drops_kv is None:
        drops_kv = reading.drops_kv and caller.agent is None and options.slot is None
    agent = None if drops_kv else caller.agent
    caller = structs.replace(caller, agent=agent, turn_kind=reading.kind)
    return structs.replace(options, caller=caller, drops_kv=drops_kv)


def _read_turn(
    service: Service, conversation: Conversation | None, options: GenerationOptions
) -> TurnReading:
    """Kind of a turn by the first feature that can tell."""
    for feature in service.features:
        reading = feature.read_turn(conversation, options)
        if reading is not None:
            return reading
    return PERSON_TURN


def _ranked(service: Service, name: str | None, caller: Caller) -> Caller:
    """The caller with the priority of its turn."""
    of_agent = service.agent_registry.settings(name).priority
    priority = turn_priority(caller.priority, of_agent, caller.turn_kind)
    return structs.replace(caller, priority=priority)


def _refuse_if_full(service: Service) -> None:
    """Refuse before the headers of a stream; the engine checks again."""
    n_waiting = len(service.engine.snapshot().waiting)
    limit = service.preset.queue.max_waiting
    if 0 < limit <= n_waiting:
        raise Busy(f"{n_waiting} requests are waiting already, no more are queued")


def check(options: GenerationOptions, n_slots: int, n_vocab: int) -> None:
    """Raises BadRequest for options that cannot work, before anything is computed."""
    if options.slot is not None and not 0 <= options.slot < n_slots:
        raise BadRequest(
            f"id_slot {options.slot} does not exist, this service has slots 0 to "
            f"{n_slots - 1}; -1 takes any",
            "id_slot",
        )
    for token, _ in options.sampling.logit_bias:
        if not 0 <= token < n_vocab:
            raise BadRequest(f"token {token} is not in the vocabulary", "logit_bias")


def room(n_prompt: int, max_tokens: int | None, n_ctx: int) -> int:
    """Number of tokens that may be generated. Raises TooLong for none."""
    if n_prompt >= n_ctx:
        raise TooLong(n_prompt, n_ctx)
    if max_tokens is None:
        return n_ctx - n_prompt
    return min(max_tokens, n_ctx - n_prompt)
