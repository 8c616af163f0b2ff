"""Agent prompts of random words or real text: generators, deterministic by seed."""

import base64
import struct
import zlib
from pathlib import Path
from random import Random
from typing import Any

from msgspec import Struct
from tokenizers import Tokenizer

from mlxstack.core.errors import Broken

Body = dict[str, Any]

WORDS = (
    *("the", "is", "word", "in", "you", "and", "are", "of", "to", "remember", "have", "will"),
    *("one", "small", "me", "code", "for", "about", "that", "do", "with", "it", "short", "an"),
    *("was", "when", "its", "sentence", "not", "very", "from", "explain", "know", "fox", "by"),
    *("did", "little", "tell", "but", "tools", "quick", "file", "read", "write", "test", "build"),
    *("server", "cache", "token", "slot", "agent", "model", "prompt"),
)

CHECKOUT = Path(__file__).parents[3]
AT_LENGTH = "Explain this text at length, sentence by sentence:\n\n"
"""Before real text, so that answers are as long as they may be."""
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
    def without_tools(self) -> "Split":
        """As many tokens, those of the tools in the system prompt.

        For templates that show no tools.
        """
        return Split(self.system + self.tools, 0, self.history, self.new)

    @property
    def total(self) -> int:
        """Tokens of the whole prompt, as asked for."""
        return self.system + self.tools + self.history + self.new

    def scaled(self, total: int) -> "Split":
        """Same proportions in about `total` tokens; equal new turn."""
        share = max(0.0, (total - self.new) / (self.total - self.new))
        system, tools, history = (int(share * n) for n in (self.system, self.tools, self.history))
        return Split(system, tools, history, self.new)


class RealText(Struct, frozen=True):
    """Real text, and the positions in characters where its tokens start."""

    text: str
    starts: tuple[int, ...]

    def part(self, random: Random, n_tokens: int) -> str:
        """So many tokens of it in a row."""
        start = random.randrange(len(self.starts) - n_tokens)
        return self.text[self.starts[start] : self.starts[start + n_tokens]]


class Yardstick(Struct, frozen=True):
    """Tokens per synthetic word and per tool for one model.

    `real` text takes the place of words.
    """

    word: float = 1.0
    tool: float = 100.0
    real: RealText | None = None


def real_text(model: Path) -> RealText:
    """Pages and engine of this checkout, in tokens of a model.

    Raises Broken for a folder without tokenizer.json.
    """
    tokenizer = model / "tokenizer.json"
    if not tokenizer.is_file():
        raise Broken(f"{model} has no tokenizer.json, which cuts the real text of the prompts")
    files = [*sorted(CHECKOUT.glob("docs/*.md")), *sorted(CHECKOUT.glob("mlxstack/engine/*.py"))]
    joined = "\n\n".join(file.read_text("utf-8") for file in files)
    joined = joined.replace("<|", "< |")  # No server shall read a special token.
    encoded = Tokenizer.from_file(str(tokenizer)).encode(joined, add_special_tokens=False)
    return RealText(joined, tuple(start for start, _ in encoded.offsets))


def text(random: Random, n_tokens: int, yard: Yardstick) -> str:
    """Real text or random words, about `n_tokens` of them."""
    if yard.real is not None:
        return yard.real.part(random, max(1, n_tokens))
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
    head = Random(f"head {team}")
    own = Random(f"member {team} {member}")
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
    asked = text(Random(f"question {seed}"), n_tokens, yard)
    content = f"{AT_LENGTH}{asked}" if yard.real is not None else asked
    return {"messages": [{"role": "user", "content": content}]}


def picture(side: int, n_tokens: int, yard: Yardstick, seed: str) -> Body:
    """A user message with a new square PNG of colored stripes."""
    asked = text(Random(f"picture {seed}"), n_tokens, yard)
    data = base64.b64encode(png(side, Random(f"stripes {seed}"))).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    parts = [image, {"type": "text", "text": asked}]
    return {"messages": [{"role": "user", "content": parts}]}


def png(side: int, random: Random) -> bytes:
    """PNG of `side` x `side` pixels, a random color per row."""
    rows = b"".join(b"\0" + random.randbytes(3) * side for _ in range(side))
    header = struct.pack(">2I5B", side, side, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


def next_turn(body: Body, last_answer: str, n_new: int, yard: Yardstick, seed: str) -> Body:
    """Next turn of the conversation, with the answer."""
    random = Random(f"turn {seed}")
    answer = {"role": "assistant", "content": last_answer}
    request = {"role": "user", "content": text(random, n_new, yard)}
    return {**body, "messages": [*body["messages"], answer, request]}


def sibling(body: Body, n_new: int, yard: Yardstick, seed: str) -> Body:
    """Sibling agent with the same head, and nothing else."""
    return {**body, "messages": [body["messages"][0], *question(n_new, yard, seed)["messages"]]}
