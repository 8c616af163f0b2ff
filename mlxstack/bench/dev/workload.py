"""Synthetic agent prompts: pure generators, deterministic by seed."""

from random import Random
from typing import Any

from msgspec import Struct

Body = dict[str, Any]

WORDS = (
    *("the", "is", "word", "in", "you", "and", "are", "of", "to", "remember", "have", "will"),
    *("one", "small", "me", "code", "for", "about", "that", "do", "with", "it", "short", "an"),
    *("was", "when", "its", "sentence", "not", "very", "from", "explain", "know", "fox", "by"),
    *("did", "little", "tell", "but", "tools", "quick", "file", "read", "write", "test", "build"),
    *("server", "cache", "token", "slot", "agent", "model", "prompt"),
)

WORDS_PER_TOOL = 60
N_HISTORY = 4
"""Turns before the new one, user and assistant taking turns."""


class Split(Struct, frozen=True):
    """Parts of an agent prompt in tokens: about 100 : 1."""

    system: int = 2000
    tools: int = 1500
    history: int = 500
    new: int = 50

    @property
    def total(self) -> int:
        """Tokens of the whole prompt, as asked for."""
        return self.system + self.tools + self.history + self.new

    def scaled(self, total: int) -> "Split":
        """Same proportions in about `total` tokens; equal new turn."""
        share = max(0.0, (total - self.new) / (self.total - self.new))
        system, tools, history = (int(share * n) for n in (self.system, self.tools, self.history))
        return Split(system, tools, history, self.new)


class Yardstick(Struct, frozen=True):
    """Tokens per synthetic word and per tool for one model."""

    word: float = 1.0
    tool: float = 100.0


def text(random: Random, n_tokens: int, yard: Yardstick) -> str:
    """Random words, about `n_tokens` of them."""
    n_words = max(1, round(n_tokens / yard.word))
    return " ".join(random.choices(WORDS, k=n_words))


def tool(random: Random) -> Body:
    """A tool whose description has `WORDS_PER_TOOL` words."""
    words = random.choices(WORDS, k=WORDS_PER_TOOL)
    name = "_".join(random.choices(WORDS, k=3))
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}}
    function = {"name": name, "description": " ".join(words), "parameters": parameters}
    return {"type": "function", "function": function}


def agent(split: Split, yard: Yardstick, team: int, member: int) -> Body:
    """First request of an agent; team members share system and tools."""
    head, own = Random(f"head {team}"), Random(f"member {team} {member}")
    system = {"role": "system", "content": text(head, split.system, yard)}
    n_tools = max(1, round(split.tools / yard.tool)) if split.tools else 0
    tools = [tool(head) for _ in range(n_tools)]
    turns = [
        {"role": "assistant" if i % 2 else "user", "content": text(own, n, yard)}
        for i, n in enumerate([split.history // N_HISTORY] * N_HISTORY if split.history else [])
    ]
    new = {"role": "user", "content": text(own, split.new, yard)}
    return {"messages": [system, *turns, new], **({"tools": tools} if tools else {})}


def question(n_tokens: int, yard: Yardstick, seed: str) -> Body:
    """A user message that was never sent before."""
    random = Random(f"question {seed}")
    return {"messages": [{"role": "user", "content": text(random, n_tokens, yard)}]}


def next_turn(body: Body, said: str, n_new: int, yard: Yardstick, seed: str) -> Body:
    """Next turn of the conversation, with the answer."""
    random = Random(f"turn {seed}")
    answer = {"role": "assistant", "content": said}
    request = {"role": "user", "content": text(random, n_new, yard)}
    return {**body, "messages": [*body["messages"], answer, request]}


def sibling(body: Body, n_new: int, yard: Yardstick, seed: str) -> Body:
    """Sibling agent with the same head, and nothing else."""
    return {**body, "messages": [body["messages"][0], *question(n_new, yard, seed)["messages"]]}
