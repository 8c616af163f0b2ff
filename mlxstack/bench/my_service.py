"""Speed of a running service by prompt length and agents.

All requests go to agents of their own under one `cache_salt`, so that nothing in the cache helps
the cold ones and nothing stays on disk; the agents are deleted at the end.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from msgspec import Struct

from mlxstack.bench.environment import Conditions
from mlxstack.bench.statistics import ratio
from mlxstack.client.client import Client
from mlxstack.client.types import CallUsage
from mlxstack.core.errors import Broken, StackError

LENGTHS = (1024, 8192, 32768)
AGENTS = (1, 2, 4)
AGENT_PROMPT = 256
N_ANSWER = 48
"""Tokens of each answer, so that a rate has enough of them."""

RESERVE = 256
"""Slot tokens for answer, second question and template.

Text of a model that knows no language takes more tokens than were sampled, and words vary.
"""

WORDS = (
    *("agent", "array", "batch", "branch", "build", "cache", "class", "commit", "compile", "error"),
    *("event", "field", "file", "folder", "function", "graph", "index", "layer", "line", "loop"),
    *("memory", "method", "model", "module", "number", "object", "order", "output", "packet"),
    *("parser", "path", "prompt", "queue", "record", "request", "result", "schema", "server"),
    *("slot", "state", "stream", "string", "table", "test", "token", "tree", "type", "value"),
)

Say = Callable[[str], None]


class PromptSpeed(Struct, frozen=True):
    """One prompt length. `warm` is the next turn of the same conversation.

    Rates are tokens per second: of computed prompt tokens until the first token, and of the
    answer after it. `skipped` says why there are no figures.
    """

    n_wanted: int
    n_prompt: int = 0
    prefill_tps: float = 0.0
    decode_tps: float = 0.0
    cold_ttft_s: float = 0.0
    warm_ttft_s: float = 0.0
    n_warm_reused: int = 0
    n_warm_new: int = 0
    skipped: str = ""


class AgentsSpeed(Struct, frozen=True):
    """Speed of concurrent agents: tokens per second, total and mean."""

    n_agents: int
    total_tps: float
    each_tps: float


class ServiceSpeed(Struct, frozen=True):
    """Everything that was measured; `conditions` of a service on this computer."""

    url: str
    model: str
    n_slots: int
    n_ctx: int
    n_busy: int
    seconds: float
    prompts: tuple[PromptSpeed, ...]
    agents: tuple[AgentsSpeed, ...]
    conditions: Conditions | None = None


class Answer(Struct, frozen=True):
    """One streamed answer; times in seconds of one clock."""

    began: float
    first: float
    last: float
    usage: CallUsage
    text: str

    @property
    def decode_tps(self) -> float:
        """Tokens per second after the first one."""
        seconds = self.last - self.first
        if seconds > 0:
            return (self.usage.completion_tokens - 1) / seconds
        return 0.0


async def measure(client: Client, limit_s: float, say: Say) -> ServiceSpeed:
    """Measure for about `limit_s` seconds. Raises Broken where the service answers nothing."""
    began = time.monotonic()
    props = await client.props()
    slots = await client.slots()
    trial = Trial(client)
    n_ctx = props.default_generation_settings.n_ctx
    try:
        await trial.calibrate()
        prompts = await _by_length(trial, n_ctx, time.monotonic() + limit_s, say)
        agents = await _by_agents(trial, props.total_slots, say)
    finally:
        await trial.clean_up()
    return ServiceSpeed(
        url=client.url,
        model=props.model_alias or props.model_path,
        n_slots=props.total_slots,
        n_ctx=n_ctx,
        n_busy=sum(slot.is_processing for slot in slots),
        seconds=time.monotonic() - began,
        prompts=tuple(prompts),
        agents=tuple(agents),
    )


class Trial:
    """Requests of one measurement, each from an agent with a unique name."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._name = f"bench-{secrets.token_hex(4)}"
        self._agents: list[str] = []
        self._words_per_token = 1.0

    async def calibrate(self) -> None:
        """Calibrate words per token, which also warms the service."""
        few, many = [
            (await self.ask([self.question(n)], self.agent(), 2)).usage.prompt_tokens
            for n in (20, 220)
        ]
        self._words_per_token = 200 / max(1, many - few)

    def agent(self) -> str:
        """A new agent."""
        self._agents.append(f"{self._name}-{len(self._agents)}")
        return self._agents[-1]

    def question(self, n_tokens: int) -> dict[str, Any]:
        """A message of about `n_tokens` tokens that was never sent before."""
        n_words = max(1, int(n_tokens * self._words_per_token))
        random = Random(f"{self._name} {len(self._agents)} {n_tokens}")
        return {"role": "user", "content": " ".join(random.choices(WORDS, k=n_words))}

    async def ask(
        self, messages: Sequence[dict[str, Any]], agent: str, n_answer: int = N_ANSWER
    ) -> Answer:
        """Stream one answer of exactly `n_answer` tokens."""
        began = time.monotonic()
        first = last = 0.0
        usage = CallUsage()
        text = ""
        stream = self._client.chat_stream(
            list(messages),
            agent=agent,
            cache_salt=self._name,
            max_tokens=n_answer,
            ignore_eos=True,
            temperature=0,
            chat_template_kwargs={"enable_thinking": False},
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            pieces = [c.delta.content or c.delta.reasoning_content or "" for c in chunk.choices]
            if any(pieces):
                last = time.monotonic()
                first = first or last
                text += "".join(pieces)
        # Tokens without text are not streamed.
        last = last or time.monotonic()
        if not usage.completion_tokens:
            raise Broken("the service ended an answer without a token or without its usage")
        return Answer(began, first or last, last, usage, text)

    async def clean_up(self) -> None:
        for agent in self._agents:
            try:
                await self._client.delete(f"/v1/agents/{agent}")
            except (StackError, ConnectionError):
                continue


async def _by_length(trial: Trial, n_ctx: int, deadline: float, say: Say) -> list[PromptSpeed]:
    """Measure the first length, then all that slots and time allow."""
    speeds: list[PromptSpeed] = []
    longest = 0
    tps = 0.0
    for length in LENGTHS:
        n_tokens = min(length, n_ctx - max(RESERVE, n_ctx // 8))
        expected_s = ratio(n_tokens, tps)
        if n_tokens == longest:
            speeds.append(PromptSpeed(length, skipped=f"a slot holds {n_ctx} tokens"))
        elif speeds and time.monotonic() + expected_s > deadline:
            speeds.append(PromptSpeed(length, skipped=f"would take about {expected_s:.0f} s"))
            longest = n_tokens
        else:
            say(f"a prompt of {n_tokens} tokens, cold and warm")
            speeds.append(await _prompt_speed(trial, length, n_tokens))
            longest = n_tokens
            tps = speeds[-1].prefill_tps
    return speeds


async def _prompt_speed(trial: Trial, length: int, n_tokens: int) -> PromptSpeed:
    agent = trial.agent()
    question = trial.question(n_tokens)
    cold = await trial.ask([question], agent)
    answer = {"role": "assistant", "content": cold.text}
    warm = await trial.ask([question, answer, trial.question(16)], agent)
    ttft_s = cold.first - cold.began
    n_computed = cold.usage.prompt_tokens - cold.usage.cached_tokens
    return PromptSpeed(
        n_wanted=length,
        n_prompt=cold.usage.prompt_tokens,
        prefill_tps=n_computed / ttft_s,
        decode_tps=cold.decode_tps,
        cold_ttft_s=ttft_s,
        warm_ttft_s=warm.first - warm.began,
        n_warm_reused=warm.usage.cached_tokens,
        n_warm_new=warm.usage.prompt_tokens - warm.usage.cached_tokens,
    )


async def _by_agents(trial: Trial, n_slots: int, say: Say) -> list[AgentsSpeed]:
    speeds = []
    for n_agents in sorted({min(n, n_slots) for n in AGENTS}):
        say(f"{n_agents} agents at once" if n_agents > 1 else "one agent")
        names = [trial.agent() for _ in range(n_agents)]
        answers = await asyncio.gather(
            *(trial.ask([trial.question(AGENT_PROMPT)], name) for name in names)
        )
        speeds.append(_agents_speed(answers))
    return speeds


def _agents_speed(answers: Sequence[Answer]) -> AgentsSpeed:
    """Rates while all agents decode, from last start to first end.

    Outside of that time not all of them decode. Answers that do not overlap have no common rate;
    theirs is that of all tokens from the first to the last.
    """
    rates = [answer.decode_tps for answer in answers]
    start = max(a.first for a in answers)
    end = min(a.last for a in answers)
    if len(answers) > 1 and start >= end:
        seconds = max(a.last for a in answers) - min(a.first for a in answers)
        total = sum(a.usage.completion_tokens for a in answers) / seconds
        return AgentsSpeed(len(answers), total, total / len(answers))
    return AgentsSpeed(len(answers), sum(rates), sum(rates) / len(rates))
