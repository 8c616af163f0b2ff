"""Admission of requests: options checked, prompt tokenized, output constrained.

Those of an explicit agent wait for its turn before.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, aclosing

from msgspec import Struct, structs

from mlxstack.core.conversation import Conversation, Role, Tool
from mlxstack.core.errors import BadRequest, Busy, Conflict, NotFound, TooLong
from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.core.request import Caller, Priority, Request, SamplingParams
from mlxstack.core.response_parts import KeepAlive, ResponsePart
from mlxstack.service.calls import agents
from mlxstack.service.calls.generation import Generation, stream_response
from mlxstack.service.parts.generation_options import UNLIMITED, GenerationOptions, ToolChoiceMode
from mlxstack.service.parts.text_processor import RawPrompt, TextProcessor
from mlxstack.service.service import Service
from mlxstack.text.grammar.constraint import ConstraintLayout, GrammarConstraint, closed
from mlxstack.text.grammar.forced_tool_call import ForcedCalls
from mlxstack.text.grammar.lazy_calls import CallTrigger
from mlxstack.text.prompt.prompt import TokenizeOptions
from mlxstack.text.prompt.splicer import Scope
from mlxstack.text.tokens.cached_tokenizer import Prompt

N_TAIL = 16

FORBIDDEN = float("-inf")


class AgentTurnRequest(Struct, frozen=True):
    """Next turn of an agent.

    `conversation` is the whole one, or its addition (`is_added`) to the stored one. `is_patient`
    waits in line instead of being refused.
    """

    conversation: Conversation
    options: GenerationOptions
    is_added: bool = False
    is_patient: bool = False


async def admit(
    service: Service, conversation: Conversation, options: GenerationOptions
) -> Generation:
    """Render, tokenize, check. Raises BadRequest, TooLong, Busy, Loading."""
    text_processor = service.text_processor
    options = await _resolved(service, text_processor, options)
    _check_tool_choice(options, conversation.tools)
    prompt = await text_processor.prompt(conversation, _scope(service, conversation, options))
    if prompt.before:
        conversation = structs.replace(conversation, continue_final=True)
    forced = _forced(text_processor, options, prompt)
    constraint = await output_constraint(text_processor, options, conversation, prompt, forced)
    prediction = await _prediction(service, text_processor, options)
    service.require_model(text_processor)
    request = _request(
        service,
        options,
        prompt,
        conversation,
        forced=forced or (),
        constraint=constraint,
        prediction=prediction,
    )
    has_grammar = forced is None and constraint is not None and constraint.has_grammar
    return Generation(request, options, prompt, text_processor, conversation, has_grammar)


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
            async with aclosing(stream_response(service, generation, first_s, beat_s)) as rest:
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
    made = await text_processor.raw(prompt)
    if not made.tokens:
        raise BadRequest("the prompt is empty; at least one token is needed", "prompt")
    constraint = await _text_constraint(text_processor, options)
    service.require_model(text_processor)
    request = _request(service, options, made, constraint=constraint)
    return Generation(request, options, made, text_processor)


def loose_schemas(generation: Generation) -> tuple[str, ...]:
    """Parts of the schemas of a request that no grammar enforces."""
    known = generation.text_processor.loose_schemas
    conversation = generation.conversation
    tools = _callable_tools(generation.options, conversation.tools) if conversation else ()
    shape = generation.options.response_format
    return (known.of(tools) if tools else ()) + (known.of(shape) if shape else ())


def _scope(service: Service, conversation: Conversation, options: GenerationOptions) -> Scope:
    """Scope of tool call replay: this agent or conversation."""
    caller = options.caller
    name = caller.agent or service.agent_registry.known_name(
        conversation, caller.session_hint, caller.salt
    )
    return caller.salt, name or ""


def _limit(service: Service, options: GenerationOptions) -> int | None:
    """Maximum tokens by the request or the preset; None without one."""
    limit = options.max_tokens
    if limit is None:
        limit = service.preset.sampling.max_tokens
    return None if limit == UNLIMITED else limit


def _request(
    service: Service,
    options: GenerationOptions,
    prompt: Prompt,
    conversation: Conversation | None = None,
    *,
    forced: tuple[int, ...] = (),
    constraint: GrammarConstraint | None = None,
    prediction: tuple[int, ...] = (),
) -> Request:
    """The request, named after everything that can refuse it. Raises Busy, TooLong."""
    _refuse_if_full(service)
    caller = options.caller
    if caller.agent is not None:
        agents.check_room(service, caller.agent)
        if conversation is not None:
            agents.check_history(caller.agent, conversation)
    service.text_processor.refuse_rowless(forced, "tool_choice")
    prompt_tokens: PromptTokens = prompt.extended(forced) if forced else prompt
    limit = options.max_tokens
    # The engine always samples one token; a prefill does not return it.
    max_tokens = room(len(prompt_tokens.tokens), 1 if limit == 0 else limit, service.n_ctx)
    now = time.monotonic()
    name = caller.agent
    if conversation is not None and name is None:
        name = service.agent_registry.name(conversation, caller.session_hint, caller.salt)
        service.agent_registry.entitle(name, conversation, caller.session_hint)
    # A grammar that has ended ends the answer.
    ends = constraint is not None and constraint.has_grammar
    messages = conversation.messages if conversation else None
    return Request(
        id=options.id,
        prompt=prompt_tokens,
        max_tokens=max_tokens,
        sampling=_sampling(service, options),
        eos=frozenset() if options.ignore_eos and not ends else service.facts.eos,
        caller=_ranked(service, name, caller),
        slot=options.slot,
        display_name=name,
        is_first_turn=messages is not None and all(m.role is not Role.ASSISTANT for m in messages),
        use_cache=options.use_cache,
        prediction=prediction,
        constraint=constraint,
        arrived=now,
        deadline=now + service.preset.queue.timeout_s,
    )


def _forced(
    text_processor: TextProcessor, options: GenerationOptions, prompt: Prompt
) -> tuple[int, ...] | None:
    """Opening tokens of a required call, None without one.

    Raises BadRequest for an unknown format. A call without a mark has no opening after the header
    that the prompt ends with.
    """
    if options.tool_choice is not ToolChoiceMode.REQUIRED:
        return None
    opening = text_processor.output_format.call_opening
    if not opening and text_processor.output_format.call_marks is None:
        raise BadRequest(
            "tool_choice: the tool call format of this model is unknown, so no call can be forced; "
            'use tool_choice "auto"',
            "tool_choice",
        )
    if prompt.is_in_thinking:
        return (*text_processor.output_format.answer_tokens, *opening)
    if prompt.before:
        return (*text_processor.output_format.message_opening, *opening)
    return opening


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


async def _prediction(
    service: Service, text_processor: TextProcessor, options: GenerationOptions
) -> tuple[int, ...]:
    """Tokens of the predicted answer, where drafts are made.

    Raises BadRequest for too many.
    """
    if not options.predicted_text or not service.engine.snapshot().is_drafting:
        return ()
    param = "prediction.content"
    too_long = BadRequest(f"{param} is longer than the context of {service.n_ctx} tokens", param)
    try:
        plain = TokenizeOptions(parse_special=False)
        tokens = await text_processor.tokenize(options.predicted_text, plain)
    except TooLong:
        raise too_long from None
    if len(tokens) > service.n_ctx:
        raise too_long
    text_processor.refuse_rowless(tokens, param)
    return tokens


def _sampling(service: Service, options: GenerationOptions) -> SamplingParams:
    """Sampling parameters; a forbidden tool call has a single opening token banned.

    An opening of several tokens is up to the constraint; one that is no mark may begin any text.
    """
    chosen = options.sampling
    if options.tool_choice is not ToolChoiceMode.NONE:
        return chosen
    banned = service.text_processor.output_format.mark_tokens
    biases = ((token, FORBIDDEN) for token in sorted(banned))
    return structs.replace(chosen, logit_bias=(*chosen.logit_bias, *biases))


def _ranked(service: Service, name: str | None, caller: Caller) -> Caller:
    """The caller, with the agent's own priority where endpoint and key give none."""
    record = service.agent_registry.find(name or "")
    if record is None or caller.priority is not Priority.NORMAL:
        return caller
    return structs.replace(caller, priority=record.priority)


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


async def output_constraint(
    text_processor: TextProcessor,
    options: GenerationOptions,
    conversation: Conversation,
    prompt: Prompt,
    forced: tuple[int, ...] | None = None,
) -> GrammarConstraint | None:
    """Constraint of an answer, if any, after `forced` tokens of a call.

    Raises BadRequest for a bad grammar.
    """
    tools = conversation.tools
    if forced is not None:
        return await _call_guide(text_processor, options, tools)
    if options.response_format is None:
        rules = None
    else:
        rules = await text_processor.shape_rules(options.response_format)
    has_tools = bool(tools) and options.tool_choice is not ToolChoiceMode.NONE
    calls = None
    forbidden = _forbidden(text_processor, options, tools)
    if has_tools:
        offered = _callable_tools(options, tools)
        calls = await text_processor.free_calls(offered, is_single=options.is_one_call)
    if rules is None and options.thinking_budget is None and not (forbidden or calls):
        return None
    may_think = text_processor.prompt_maker.variables.may_think(conversation)
    layout = _layout(
        text_processor, options, prompt, forbidden, calls, has_tools=has_tools, may_think=may_think
    )
    return GrammarConstraint(layout, rules)


async def _text_constraint(
    text_processor: TextProcessor, options: GenerationOptions
) -> GrammarConstraint | None:
    """Constraint of a continued text, which has no reasoning."""
    if options.response_format is None:
        return None
    rules = await text_processor.shape_rules(options.response_format)
    layout = ConstraintLayout(text_processor.n_vocab, banned=_banned(options))
    if rules is None:
        return None
    return GrammarConstraint(layout, rules)


def _banned(options: GenerationOptions) -> frozenset[int]:
    return frozenset(token for token, bias in options.sampling.logit_bias if bias == FORBIDDEN)


def _check_tool_choice(options: GenerationOptions, tools: tuple[Tool, ...]) -> None:
    """Raises BadRequest for unknown names, and for a required call without tools."""
    if options.tool_choice is ToolChoiceMode.NONE:
        return
    known = {tool.name for tool in tools}
    for name in _chosen_tools(options):
        if name not in known:
            raise BadRequest(f"tool_choice: no tool is named {name!r}", "tool_choice")
    if options.tool_choice is ToolChoiceMode.REQUIRED and not tools:
        raise BadRequest(
            "tool_choice requires a tool call, but the request has no tools that the model can "
            'call; list them in tools, or use tool_choice "auto"',
            "tool_choice",
        )


def _chosen_tools(options: GenerationOptions) -> tuple[str, ...]:
    """Names that `tool_choice` restricts calls to; none if it does not."""
    if options.forced_tool is None:
        return options.allowed_tools
    return (options.forced_tool,)


def _callable_tools(options: GenerationOptions, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    """Tools that calls may name."""
    chosen = _chosen_tools(options)
    if chosen:
        return tuple(tool for tool in tools if tool.name in chosen)
    return tools


async def _call_guide(
    text_processor: TextProcessor, options: GenerationOptions, tools: tuple[Tool, ...]
) -> GrammarConstraint | None:
    """Constraint of tool calls; None leaves only the opening forced."""
    marks = text_processor.output_format.call_marks
    if marks is None:
        return None
    is_single = options.is_one_call or options.forced_tool is not None
    rules = await text_processor.call_rules(
        ForcedCalls(_callable_tools(options, tools), marks, is_single)
    )
    layout = ConstraintLayout(text_processor.n_vocab, banned=_banned(options))
    if rules is None:
        return None
    return GrammarConstraint(layout, rules)


def _layout(
    text_processor: TextProcessor,
    options: GenerationOptions,
    prompt: Prompt,
    forbidden: tuple[tuple[int, ...], ...],
    calls: CallTrigger | None,
    *,
    has_tools: bool,
    may_think: bool,
) -> ConstraintLayout:
    output_format = text_processor.output_format
    tail = prompt.tokens[-N_TAIL:]
    # The answer begins with the header of a message.
    has_headers = output_format.has_headers and not prompt.before
    is_in_thinking = prompt.is_in_thinking or (has_headers and may_think)
    may_open = may_think and not is_in_thinking and not closed(output_format.answer_tokens, tail)
    openings = (output_format.call_opening,) if has_tools else ()
    if is_in_thinking or may_open:
        text_processor.refuse_rowless(output_format.answer_tokens, "messages")
    return ConstraintLayout(
        n_vocab=text_processor.n_vocab,
        eos=output_format.eos,
        is_in_thinking=is_in_thinking,
        opens=output_format.thought_tokens if may_open else frozenset(),
        closes=output_format.answer_tokens,
        escapes=output_format.call_tokens if has_tools else frozenset(),
        budget=options.thinking_budget,
        may_end=has_headers and has_tools and not may_open,
        headers=(output_format.answer_tokens, *openings) if has_headers and not may_think else (),
        forbidden=forbidden,
        before=tail,
        calls=calls,
        banned=_banned(options),
    )


def _forbidden(
    text_processor: TextProcessor, options: GenerationOptions, tools: tuple[Tool, ...]
) -> tuple[tuple[int, ...], ...]:
    """Token sequences that open a call, where calls are forbidden."""
    if options.tool_choice is not ToolChoiceMode.NONE or not tools:
        return ()
    return text_processor.output_format.call_sequences
