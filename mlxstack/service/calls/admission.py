"""Admission of requests: options checked, prompt tokenized, output constrained."""

import time
from typing import TypeVar

from msgspec import Struct, structs
from msgspec.structs import replace

from mlxstack.core.conversation import Conversation, Role, Tool
from mlxstack.core.errors import BadRequest, Busy, TooLong
from mlxstack.core.request import Priority, Request, SamplingParams
from mlxstack.policy.sampling import default_sampling
from mlxstack.service.calls import agents
from mlxstack.service.parts.generation_options import (
    UNLIMITED,
    GenerationOptions,
    SamplingOverrides,
    ToolChoiceMode,
)
from mlxstack.service.parts.text_processor import RawPrompt, TextProcessor
from mlxstack.service.service import Service
from mlxstack.text.grammar.constraint import ConstraintLayout, GrammarConstraint, closed
from mlxstack.text.grammar.forced_tool_call import ForcedCalls
from mlxstack.text.output_format import OutputFormat
from mlxstack.text.output_parser import ParseOptions
from mlxstack.text.prompt.answer_replay import AnswerAnchor
from mlxstack.text.prompt.prompt import Prompt, TokenizeOptions
from mlxstack.text.prompt.tool_call_replay import Scope

T = TypeVar("T")
LEAST_TOP_P = 1e-6
N_TAIL = 16

FORBIDDEN = float("-inf")


class ParseConfig(Struct, frozen=True):
    """Options of the response parser.

    `forced` are tokens of the answer that the prompt ends with. `may_fill_context`: the request set
    no limit below the remaining context. `is_prefill`: only the prompt is computed. `anchor`: the
    place of the answer in the prompt, if the answer is to be replayed. `n_replayed`: replayed
    answers and calls of the prompt.
    """

    parse_options: ParseOptions
    forced: tuple[int, ...] = ()
    call_prefix: str = "call_"
    may_fill_context: bool = False
    is_one_call: bool = False
    has_progress: bool = False
    is_prefill: bool = False
    anchor: AnswerAnchor | None = None
    n_replayed: int = 0


class GuidedPrompt(Struct, frozen=True):
    """A prompt with the rules of its answer.

    The answer begins with the `forced` tokens.
    """

    prompt: Prompt
    parse_options: ParseOptions
    constraint: GrammarConstraint | None = None
    forced: tuple[int, ...] = ()
    prediction: tuple[int, ...] = ()


class AdmittedRequest(Struct, frozen=True):
    """Request that passed all checks.

    `text_processor` is that of the model whose tokens these are; no other model may answer.
    `conversation` is the source of the prompt, unless that was plain text or tokens.
    `loose_schemas` are parts of the tools' schemas that no grammar enforces, `omitted_tools` the
    tools of a vendor's servers, which are not offered to the model.
    """

    request: Request
    parsing: ParseConfig
    text_processor: TextProcessor
    conversation: Conversation | None = None
    loose_schemas: tuple[str, ...] = ()
    omitted_tools: tuple[str, ...] = ()

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop strings of the request."""
        return self.parsing.parse_options.stops


async def admit(
    service: Service, conversation: Conversation, options: GenerationOptions
) -> AdmittedRequest:
    """Render, tokenize, check. Raises BadRequest, TooLong, Busy, Loading."""
    text_processor = service.text_processor
    options = await _with_biases(text_processor, options)
    check(options, service.preset.slots.count, service.facts.n_vocab)
    _check_tool_choice(options, conversation.tools)
    prompt = await text_processor.prompt(conversation, _scope(service, conversation, options))
    if prompt.before:
        conversation = structs.replace(conversation, continue_final=True)
    forced = _forced(text_processor, options, prompt)
    constraint = await output_constraint(
        text_processor, options, conversation.tools, prompt, forced
    )
    prediction = await _prediction(service, text_processor, options)
    service.require_model(text_processor)
    parse_options = ParseOptions(
        tools=() if options.tool_choice is ToolChoiceMode.NONE else conversation.tools,
        stops=options.stop,
        is_in_thinking=prompt.is_in_thinking,
        before=prompt.before,
        has_grammar=forced is None and constraint is not None and constraint.has_grammar,
    )
    made = GuidedPrompt(prompt, parse_options, constraint, forced or (), prediction)
    return _admitted(service, options, made, conversation)


async def admit_text(
    service: Service, prompt: RawPrompt, options: GenerationOptions
) -> AdmittedRequest:
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
) -> AdmittedRequest:
    text_processor = service.text_processor
    options = await _with_biases(text_processor, options)
    check(options, service.preset.slots.count, service.facts.n_vocab)
    made = await text_processor.raw(prompt)
    if not made.tokens:
        raise BadRequest("the prompt is empty; at least one token is needed", "prompt")
    parse_options = ParseOptions(stops=options.stop, before=made.before, is_raw=True)
    constraint = await _text_constraint(text_processor, options)
    service.require_model(text_processor)
    return _admitted(service, options, GuidedPrompt(made, parse_options, constraint))


def _scope(service: Service, conversation: Conversation, options: GenerationOptions) -> Scope:
    """Scope of tool call replay: this agent or conversation."""
    name = options.agent or service.agent_registry.known_name(
        conversation, options.session_hint, options.salt
    )
    return Scope(options.salt, name or "")


def _admitted(
    service: Service,
    options: GenerationOptions,
    made: GuidedPrompt,
    conversation: Conversation | None = None,
) -> AdmittedRequest:
    """The request, named after everything that can refuse it. Raises Busy, TooLong."""
    _refuse_if_full(service)
    if options.agent is not None:
        agents.check_room(service, options.agent)
    prompt, tokens = made.prompt, made.prompt.tokens + made.forced
    wished = options.max_tokens
    if wished is None:
        wished = service.preset.sampling.max_tokens
    if wished == UNLIMITED:
        wished = None
    # The engine always samples one token; a prefill does not return it.
    is_prefill = wished == 0
    max_tokens = room(len(tokens), 1 if is_prefill else wished, service.n_ctx)
    parsing = ParseConfig(
        made.parse_options,
        made.forced,
        call_prefix=options.call_prefix,
        may_fill_context=wished is None or wished > max_tokens,
        is_one_call=options.is_one_call,
        has_progress=options.has_progress,
        is_prefill=is_prefill,
        anchor=prompt.anchor,
        n_replayed=prompt.n_replayed,
    )
    tools = _callable_tools(options, conversation.tools) if conversation else ()
    return AdmittedRequest(
        request=_request(service, options, made, max_tokens, conversation),
        parsing=parsing,
        text_processor=service.text_processor,
        conversation=conversation,
        loose_schemas=service.text_processor.loose_schemas.of(tools) if tools else (),
    )


def _request(
    service: Service,
    options: GenerationOptions,
    made: GuidedPrompt,
    max_tokens: int,
    conversation: Conversation | None,
) -> Request:
    now, name = time.monotonic(), options.agent or options.display_name
    if conversation is not None and options.agent is None:
        name = service.agent_registry.name(conversation, options.session_hint, options.salt)
        service.agent_registry.entitle(name, conversation, options.session_hint)
    # A grammar that has ended ends the answer.
    ends = made.constraint is not None and made.constraint.has_grammar
    messages = conversation.messages if conversation else None
    return Request(
        id=options.id,
        tokens=made.prompt.tokens + made.forced,
        max_tokens=max_tokens,
        sampling=_sampling(service, options),
        eos=frozenset() if options.ignore_eos and not ends else service.facts.eos,
        slot=options.slot,
        agent=options.agent,
        session_hint=options.session_hint,
        client=options.client,
        display_name=name,
        is_first_turn=messages is not None and all(m.role is not Role.ASSISTANT for m in messages),
        priority=_priority(service, name, options.priority),
        use_cache=options.use_cache,
        checkpoint_positions=made.prompt.checkpoint_positions,
        images=made.prompt.images,
        salt=options.salt,
        prediction=made.prediction,
        request_id=options.request,
        constraint=made.constraint,
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
    return (*text_processor.output_format.message_opening, *opening) if prompt.before else opening


async def _with_biases(
    text_processor: TextProcessor, options: GenerationOptions
) -> GenerationOptions:
    """Replace biases of texts by token biases; special tokens get none."""
    overrides = options.sampling
    if not overrides.bias_texts:
        return options
    biases = list(overrides.logit_bias)
    for text, bias in overrides.bias_texts:
        tokens = await text_processor.tokenize(text, TokenizeOptions(parse_special=False))
        biases += [(token, bias) for token in tokens]
    return structs.replace(
        options, sampling=structs.replace(overrides, logit_bias=tuple(biases), bias_texts=())
    )


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
    return tokens


def _sampling(service: Service, options: GenerationOptions) -> SamplingParams:
    """Sampling parameters; a forbidden tool call has a single opening token banned.

    An opening of several tokens is up to the constraint; one that is no mark may begin any text.
    """
    defaults = default_sampling(service.preset.sampling, service.facts.defaults)
    chosen = sampling(options.sampling, defaults, service.n_ctx)
    if options.tool_choice is not ToolChoiceMode.NONE:
        return chosen
    banned = service.text_processor.output_format.mark_tokens
    biases = ((token, FORBIDDEN) for token in sorted(banned))
    return structs.replace(chosen, logit_bias=(*chosen.logit_bias, *biases))


def _priority(service: Service, name: str | None, priority: Priority) -> Priority:
    """Priority of endpoint or key, else the one set for the agent."""
    record = service.agent_registry.find(name or "")
    return priority if record is None or priority is not Priority.NORMAL else record.priority


def _refuse_if_full(service: Service) -> None:
    """Refuse before the headers of a stream; the engine checks again."""
    n_waiting, limit = len(service.engine.snapshot().waiting), service.preset.queue.max_waiting
    if 0 < limit <= n_waiting:
        raise Busy(f"{n_waiting} requests are waiting already, no more are queued")


def sampling(overrides: SamplingOverrides, defaults: SamplingParams, n_ctx: int) -> SamplingParams:
    """Sampling parameters: the request's, else those of requests that set none.

    As for llama-server, penalties look at the whole context for a window of -1, and are off for one
    of 0.
    """
    window = _first(overrides.window, defaults.window)
    has_penalties = window != 0
    repetition = _first(overrides.repetition_penalty, defaults.repetition_penalty)
    return SamplingParams(
        temperature=max(0.0, _first(overrides.temperature, defaults.temperature)),
        top_p=max(_first(overrides.top_p, defaults.top_p), LEAST_TOP_P),
        top_k=max(0, _first(overrides.top_k, defaults.top_k)),
        min_p=_first(overrides.min_p, defaults.min_p),
        seed=_seed(overrides.seed),
        repetition_penalty=repetition if has_penalties else 1.0,
        presence_penalty=(overrides.presence_penalty or 0.0) if has_penalties else 0.0,
        frequency_penalty=(overrides.frequency_penalty or 0.0) if has_penalties else 0.0,
        window=n_ctx if window < 0 else min(max(window, 1), n_ctx),
        logit_bias=overrides.logit_bias,
        top_logprobs=overrides.top_logprobs,
    )


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
    return n_ctx - n_prompt if max_tokens is None else min(max_tokens, n_ctx - n_prompt)


def _first(given: T | None, default: T) -> T:
    return default if given is None else given


def _seed(seed: int | None) -> int | None:
    """Seed as 64 bits, or None for a random (negative) one."""
    return None if seed is None or seed < 0 else seed % 2**63


async def output_constraint(
    text_processor: TextProcessor,
    options: GenerationOptions,
    tools: tuple[Tool, ...],
    prompt: Prompt,
    forced: tuple[int, ...] | None = None,
) -> GrammarConstraint | None:
    """Constraint of an answer, if any, after `forced` tokens of a call.

    Raises BadRequest for a bad grammar.
    """
    if forced is not None:
        return await _call_guide(text_processor, options, tools)
    rules = (
        None
        if options.response_format is None
        else await text_processor.shape_rules(options.response_format)
    )
    layout = await _layout(text_processor, options, tools, prompt)
    if rules is None and options.thinking_budget is None and not (layout.forbidden or layout.calls):
        return None
    return GrammarConstraint(layout, rules)


async def _text_constraint(
    text_processor: TextProcessor, options: GenerationOptions
) -> GrammarConstraint | None:
    """Constraint of a continued text, which has no reasoning."""
    if options.response_format is None:
        return None
    rules = await text_processor.shape_rules(options.response_format)
    layout = ConstraintLayout(text_processor.n_vocab, banned=_banned(options))
    return None if rules is None else GrammarConstraint(layout, rules)


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
    return options.allowed_tools if options.forced_tool is None else (options.forced_tool,)


def _callable_tools(options: GenerationOptions, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    """Tools that calls may name."""
    chosen = _chosen_tools(options)
    return tuple(tool for tool in tools if tool.name in chosen) if chosen else tools


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
    return None if rules is None else GrammarConstraint(layout, rules)


async def _layout(
    text_processor: TextProcessor,
    options: GenerationOptions,
    tools: tuple[Tool, ...],
    prompt: Prompt,
) -> ConstraintLayout:
    output_format = text_processor.output_format
    has_tools = bool(tools) and options.tool_choice is not ToolChoiceMode.NONE
    may_think, has_headers = prompt.may_think, _has_headers(output_format, prompt)
    before = ConstraintLayout(
        n_vocab=text_processor.n_vocab,
        eos=output_format.eos,
        is_in_thinking=prompt.is_in_thinking or (has_headers and may_think),
        closes=output_format.answer_tokens,
        escapes=output_format.call_tokens if has_tools else frozenset(),
        budget=options.thinking_budget,
        may_end=has_headers and has_tools,
        headers=_headers(output_format, has_tools) if has_headers and not may_think else (),
        forbidden=_forbidden(text_processor, options, tools),
        before=prompt.tokens[-N_TAIL:],
        calls=await text_processor.free_calls(
            _callable_tools(options, tools), is_single=options.is_one_call
        )
        if has_tools
        else None,
        banned=_banned(options),
    )
    if before.is_in_thinking or not may_think or closed(before, prompt.tokens[-N_TAIL:]):
        return before
    return replace(before, opens=output_format.thought_tokens, may_end=False)


def _has_headers(output_format: OutputFormat, prompt: Prompt) -> bool:
    """True if the answer begins with the header of a message."""
    return output_format.has_headers and not prompt.before


def _headers(output_format: OutputFormat, has_tools: bool) -> tuple[tuple[int, ...], ...]:
    """Openings of an answer without reasoning."""
    calls = (output_format.call_opening,) if has_tools else ()
    return (output_format.answer_tokens, *calls)


def _forbidden(
    text_processor: TextProcessor, options: GenerationOptions, tools: tuple[Tool, ...]
) -> tuple[tuple[int, ...], ...]:
    """Token sequences that open a call, where calls are forbidden."""
    if options.tool_choice is not ToolChoiceMode.NONE or not tools:
        return ()
    return text_processor.output_format.call_sequences
