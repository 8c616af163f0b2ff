"""From a conversation to the parts of its reply."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence

from msgspec import Struct, structs

from mlxstack.core.ask import Ask, Priority, Sampling
from mlxstack.core.conversation import Conversation
from mlxstack.core.errors import BadRequest, Busy
from mlxstack.core.event import Seated
from mlxstack.service import agent_locks, agents, guiding
from mlxstack.service.ear import Ear, Hearing
from mlxstack.service.options import UNLIMITED, Bounds, Calling, Options, check, room, sampling
from mlxstack.service.parts import Called, Content, Ended, Part, Reasoning, Spoken
from mlxstack.service.service import Service
from mlxstack.service.words import Words
from mlxstack.store.agent_locks import AgentLock
from mlxstack.text.guide import Guide
from mlxstack.text.prompt import Prompt, Spelling
from mlxstack.text.replay import Scope
from mlxstack.text.speech import Manner

FORBIDDEN = float("-inf")


class Order(Struct, frozen=True):
    """An admitted request: nothing foreseeable is wrong with it.

    `words` are the text tools of the model whose tokens these are; no other model may answer.
    `conversation` is what it was made of, unless it was made of plain text or tokens.
    """

    ask: Ask
    hearing: Hearing
    words: Words
    conversation: Conversation | None = None

    @property
    def stop(self) -> tuple[str, ...]:
        """The stop strings of the request."""
        return self.hearing.manner.stops


async def admit(service: Service, conversation: Conversation, options: Options) -> Order:
    """Render, tokenise, check. Raises BadRequest, TooLong, Busy, Loading."""
    words = service.words
    options = await _with_biases(words, options)
    check(options, _bounds(service))
    prompt = await words.prompt(conversation, _scope(service, conversation, options))
    tools = guiding.required(options, conversation.tools)
    forced = _forced(words, options, prompt, bool(tools))
    opening = guiding.Opening(conversation, prompt, forced)
    guide = await guiding.guide(words, options, opening)
    service.require_model(words)
    manner = Manner(
        tools=() if options.calling is Calling.NONE else conversation.tools,
        stops=options.stop,
        is_in_thinking=prompt.is_in_thinking,
        before=prompt.before,
    )
    order = _order(service, prompt, Hearing(manner, forced), options)
    if options.agent is None:
        name = service.roster.name(conversation, options.hint, options.salt)
        order = _named(service, order, structs.replace(options, name=name))
    return structs.replace(_guided(service, order, guide), conversation=conversation)


async def admit_text(
    service: Service, prompt: str | Sequence[int | str], options: Options
) -> Order:
    """The same for a raw text or tokens, in whose continuation nothing is a marker."""
    words = service.words
    options = await _with_biases(words, options)
    check(options, _bounds(service))
    made = await words.raw(prompt)
    if not made.tokens:
        raise BadRequest("the prompt is empty; at least one token is needed", "prompt")
    manner = Manner(stops=options.stop, before=made.before, is_raw=True)
    guide = await guiding.text_guide(words, options)
    service.require_model(words)
    return _guided(service, _order(service, made, Hearing(manner), options), guide)


async def reply(
    service: Service, order: Order, first_s: float, beat_s: float
) -> AsyncGenerator[Part, None]:
    """The parts as they come; leaving the iterator cancels the ask.

    The first part comes within `first_s` seconds and the next ones within `beat_s`: Quiet when
    there is nothing to say. Raises what the engine fails with.
    """
    clock = asyncio.get_running_loop().time
    ear = Ear(order.ask, order.hearing, order.words.voice, order.words.maker.replay)
    due = clock() + first_s
    spoken: list[Spoken] = []
    lock = AgentLock()
    if order.ask.agent is not None:
        await service.lines.until_no_act(order.ask.agent)
        lock = await agent_locks.request(service, order.ask.agent)
    with lock, service.open(order.ask, order.words) as ticket:
        while not ticket.is_over:
            event = await ticket.next(max(0.0, due - clock()))
            if isinstance(event, Seated):
                service.remember(event, order.ask)
            parts = ear.hear(event)
            if ear.is_enough:
                ticket.cancel()
            for part in parts or ([ear.quiet()] if clock() >= due else []):
                if isinstance(part, Ended):
                    service.n_unparsed += part.n_unparsed
                    await _remember(service, order, spoken)
                elif isinstance(part, Reasoning | Content | Called):
                    spoken.append(part)
                yield part
                due = clock() + beat_s


async def _remember(service: Service, order: Order, spoken: list[Spoken]) -> None:
    """What an explicit agent heard and said is kept, before anybody sees the end of it."""
    agent, conversation = order.ask.agent, order.conversation
    if agent is not None and conversation is not None:
        await agents.heard(service, agent, conversation, spoken)


def _scope(service: Service, conversation: Conversation, options: Options) -> Scope:
    """The calls that were sampled for this very agent or conversation."""
    name = options.agent or service.roster.known_name(conversation, options.hint, options.salt)
    return Scope(options.salt, name or "")


def _order(service: Service, prompt: Prompt, hearing: Hearing, options: Options) -> Order:
    _refuse_if_full(service)
    if options.agent is not None:
        agents.check_room(service, options.agent)
    tokens = prompt.tokens + hearing.forced
    now = time.monotonic()
    wished = options.max_tokens
    if wished is None:
        wished = service.preset.sampling.max_tokens
    if wished == UNLIMITED:
        wished = None
    # The engine always samples one token; a prefill does not say it.
    is_prefill = wished == 0
    max_tokens = room(len(tokens), 1 if is_prefill else wished, service.n_ctx)
    return Order(
        ask=Ask(
            id=options.id,
            tokens=tokens,
            max_tokens=max_tokens,
            sampling=_sampling(service, options),
            eos=frozenset() if options.ignore_eos else service.facts.eos,
            slot=options.slot,
            agent=options.agent,
            hint=options.hint,
            name=options.agent or options.name,
            priority=_priority(service, options),
            use_cache=options.use_cache,
            cuts=prompt.cuts,
            salt=options.salt,
            request=options.request,
            arrived=now,
            deadline=now + service.preset.queue.timeout_s,
        ),
        hearing=structs.replace(
            hearing,
            call_prefix=options.call_prefix,
            may_fill_context=wished is None or wished > max_tokens,
            is_one_call=options.is_one_call,
            has_progress=options.has_progress,
            is_prefill=is_prefill,
        ),
        words=service.words,
    )


def _named(service: Service, order: Order, options: Options) -> Order:
    """Only now that nothing refuses it: the names that are remembered are for who is served."""
    ask = structs.replace(order.ask, name=options.name, priority=_priority(service, options))
    return structs.replace(order, ask=ask)


def _guided(service: Service, order: Order, guide: Guide | None) -> Order:
    """What follows a grammar to its end has nothing to say after it."""
    if guide is None:
        return order
    eos = service.facts.eos if guide.has_rules else order.ask.eos
    return structs.replace(order, ask=structs.replace(order.ask, guide=guide, eos=eos))


def _forced(words: Words, options: Options, prompt: Prompt, has_tools: bool) -> tuple[int, ...]:
    """The beginning of a tool call, when one is required. Raises BadRequest if there is none."""
    if options.calling is not Calling.REQUIRED or not has_tools:
        return ()
    opening = words.voice.call_opening
    if not opening:
        raise BadRequest(
            "tool_choice: no way is known in which this model writes tool calls, so that none can "
            'be forced; use tool_choice "auto"',
            "tool_choice",
        )
    if prompt.is_in_thinking:
        return (*words.tokenizer.think_end_tokens, *opening)
    return (*words.voice.message_opening, *opening) if prompt.before else opening


async def _with_biases(words: Words, options: Options) -> Options:
    """The options with biases of texts as those of their tokens; special tokens are none."""
    wish = options.wish
    if not wish.bias_texts:
        return options
    found = list(wish.logit_bias)
    for text, bias in wish.bias_texts:
        tokens = await words.tokenize(text, Spelling(parse_special=False))
        found += [(token, bias) for token in tokens]
    return structs.replace(
        options, wish=structs.replace(wish, logit_bias=tuple(found), bias_texts=())
    )


def _sampling(service: Service, options: Options) -> Sampling:
    """A forbidden tool call is one whose opening mark cannot be chosen.

    An opening of several tokens is up to the guide.
    """
    preset, model = service.preset.sampling, service.facts.defaults
    chosen = sampling(options.wish, preset, model, service.n_ctx)
    opening = service.words.voice.call_opening
    if options.calling is not Calling.NONE or len(opening) != 1:
        return chosen
    return structs.replace(chosen, logit_bias=(*chosen.logit_bias, (opening[0], FORBIDDEN)))


def _priority(service: Service, options: Options) -> Priority:
    """The endpoint's or the key's, else what somebody gave this agent."""
    record = service.roster.find(options.agent or options.name or "")
    if record is None or options.priority is not Priority.NORMAL:
        return options.priority
    return record.priority


def _bounds(service: Service) -> Bounds:
    return Bounds(service.n_ctx, service.preset.slots.count, service.facts.n_vocab)


def _refuse_if_full(service: Service) -> None:
    """The engine has the last word; this one comes before the headers of a stream."""
    n_waiting, limit = len(service.engine.snapshot().waiting), service.preset.queue.max_waiting
    if 0 < limit <= n_waiting:
        raise Busy(f"{n_waiting} requests are waiting already, no more are queued")
