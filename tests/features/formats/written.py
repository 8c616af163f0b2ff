"""`python -m tests.features.formats.written`: answers that templates write, and their reading.

For each template in MLX_STACK_FORMATS: 15 answers as it writes them after its prompt, read back;
the CPU milliseconds of its derivation. An answer that shares its text with another one, such as
that without its thought or without a null, is not told apart by the template itself: that is
found by rendering both, and the answer is left out of the sum.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec.structs import replace

from mlxstack.core.conversation import Conversation, Message, Role, Tool, ToolCall
from mlxstack.core.errors import BadRequest
from mlxstack.features.formats import derivation
from mlxstack.features.formats.answer_reader import read_answer
from mlxstack.features.formats.call_derivation import MIN_PROSE
from mlxstack.features.formats.derivation import derive_format
from mlxstack.features.formats.probe_renderings import common_start, opened_length, tokens
from mlxstack.features.formats.syntax import DerivedFormat
from mlxstack.text.assembly import assemble_text
from tests.features.formats.test_derived_formats import CODE
from tests.text.test_published_templates import TEMPLATES, tokenizer_of

SAID = "Hey there!"
TEXT_TYPE = {"type": "string"}
PROPERTIES = {
    "path": TEXT_TYPE, "old": TEXT_TYPE, "new": TEXT_TYPE, "n": {"type": "integer"},
    "all": {"type": "boolean"}, "lines": {"type": "array", "items": {"type": "integer"}},
    "more": {"type": "object"}, "maybe": {"type": ["string", "null"]},
    "tasks": {"type": "array", "items": {"type": "object"}},
}  # fmt: skip
TOOLS = (
    Tool("edit", "Edits.", {"type": "object", "properties": PROPERTIES}),
    Tool("now", "Tells.", {"type": "object", "properties": {}}),
)
THOUGHT = "I should look\nat the file first."
TEXT = "Let me look at it.\nOne moment."
READ: dict[str, Any] = {"path": "src/main.py", "n": 3}


def answer(*calls: dict[str, Any], text: str = "", thought: str | None = None) -> Message:
    """An answer with calls of `edit`; a call without arguments is one of `now`."""
    made = (ToolCall(f"call{i:05}", "edit" if one else "now", one) for i, one in enumerate(calls))
    return Message(Role.ASSISTANT, text, thought, tuple(made))


ANSWERS = {
    "text": answer(text=TEXT),
    "thought, text": answer(text=TEXT, thought=THOUGHT),
    "call": answer(READ),
    "text, call": answer(READ, text=TEXT),
    "thought, call": answer(READ, thought=THOUGHT),
    "thought, text, call": answer(READ, text=TEXT, thought=THOUGHT),
    "two calls": answer(READ, {"path": "b.py", "all": True}),
    "no arguments": answer({}),
    "code": answer({"path": "a.c", "old": CODE, "new": "\tfoo();\n\n\tbar();  // é 格 {}[]"}),
    "edges": answer({"path": "a.py", "old": "  two spaces\n", "new": "\n\nlines\n"}),
    "text like JSON": answer({"path": "5", "old": "true", "new": "[1, 2]"}),
    "the text null": answer({"path": "null", "old": "None"}),
    "tags": answer({"path": "</parameter>", "new": "<tool_call>\n</tool_call> </think>"}),
    "nested": answer({"tasks": [{"name": "a, b", "sub": {"k": [1, None, 2.5]}}, {"name": "c"}]}),
    "types": answer({"all": False, "lines": [1, 2], "more": {"a": {"b": None}}, "maybe": None}),
}


class Template:
    """A template with its format, and the texts of answers after its prompt."""

    def __init__(self, tokenizer: Any) -> None:
        self.format: DerivedFormat = derive_format(tokenizer)
        self._prompt_maker = assemble_text(tokenizer).prompt_maker
        added = tokenizer.added_tokens_decoder
        channels = self.format.channels
        inner = () if channels is None else channels.ends
        ends = [added[at].content for at in tokenizer.eos_token_ids if at in added]
        # A message of a channel may be followed by others.
        self._ends = [end for end in ends if end not in inner]
        self._asked = Conversation((Message(Role.USER, SAID),), TOOLS, thinking=True)
        self.prompt = self._prompt_maker.text(self._asked)
        self._bare = self._prompt_maker.text(replace(self._asked, add_generation_prompt=False))
        # Instructions may follow any last message.
        rest = tokens(self._bare.rpartition(SAID)[2])
        ends = ("".join(rest[at:]) for at in range(len(rest)))
        self._following = [end for end in ends if len(end) >= MIN_PROSE]
        self.is_in_thinking = self._prompt_maker.make(self._asked).is_in_thinking

    def written(self, one: Message) -> str:
        """The text of an answer up to its end, without the opening of the prompt."""
        asked = self._asked
        turns = replace(asked, messages=(*asked.messages, one), add_generation_prompt=False)
        try:
            whole = self._prompt_maker.text(turns)
        except BadRequest:
            return ""
        text = whole[len(self.prompt) :]
        if not whole.startswith(self.prompt):
            text = self._constructed(whole, one)
        ends = [*self._ends, *self._following]
        return text[: min((text.find(end) for end in ends if end in text), default=len(text))]

    def _constructed(self, whole: str, one: Message) -> str:
        """The text that goes on a prompt which opens an answer otherwise than the template."""
        opening = _opened(self._bare, self.prompt)
        body = _opened(self._bare, whole)
        marks = self.format.reasoning
        if self.is_in_thinking and marks is not None and marks.opens in opening:
            body = body.removeprefix(opening[: opening.rindex(marks.opens)])
            if body.startswith(marks.opens):
                return body.removeprefix(marks.opens).lstrip("\n")
            is_closing = body.lstrip().startswith(marks.closes)
            thought = "" if is_closing else f"{one.reasoning or ''}\n{marks.closes}\n\n"
            return thought + body
        return body[opened_length(opening, body) :]

    def reads(self, one: Message) -> bool:
        """Whether an answer is read as it was given.

        A thought is given with the words by which the prompt begins it.
        """
        text = self.format.reasoning.prefix if self.format.reasoning else ""
        thought = text + one.reasoning if one.reasoning else ""
        opened = replace(one, reasoning=thought or text) if text else one
        read = read_answer(
            self.format, self.written(opened), TOOLS, is_in_thinking=self.is_in_thinking
        )
        return (
            [(call.name, call.arguments) for call in read.tool_calls],
            read.content.strip(),
            read.reasoning_content.strip(),
        ) == (
            [(call.name, call.arguments) for call in one.tool_calls],
            one.text.strip(),
            thought.strip(),
        )

    def same_as(self, one: Message) -> str:
        """The change that leaves the text of an answer as it is, or ""."""
        text = self.written(one)
        return next((kind for kind, other in others(one) if self.written(other) == text), "")


def _opened(bare: str, whole: str) -> str:
    """The text after a conversation, although its last message may have been written otherwise."""
    start = common_start(bare, whole)
    said = whole.rfind(SAID) + len(SAID)
    if start < said:
        start = said + common_start(bare.rpartition(SAID)[2], whole[said:])
    return whole[start:].lstrip()


def others(one: Message) -> Iterator[tuple[str, Message]]:
    """Other answers, by their difference."""
    both = "\n\n".join(filter(None, (one.reasoning, one.text)))
    if one.text:
        yield "without its text", replace(one, text="")
        yield "its text as thought", replace(one, text="", reasoning=both)
    if one.reasoning:
        yield "without its thought", replace(one, reasoning=None)
        yield "its thought as text", replace(one, text=both, reasoning=None)
    if one.tool_calls:
        yield "without its calls", replace(one, tool_calls=())
        yield "without its last call", replace(one, tool_calls=one.tool_calls[:-1])
        bare = tuple(replace(call, arguments=_bare(call.arguments)) for call in one.tool_calls)
        if bare != one.tool_calls:
            yield "without its nulls", replace(one, tool_calls=bare)
    if one.text and one.tool_calls:
        yield "without text and calls", replace(one, text="", tool_calls=())
        yield "without text and thought", replace(one, text="", reasoning=None)
        yield "without thought and calls", replace(one, reasoning=None, tool_calls=())


def _bare(value: Any) -> Any:
    """A value without the members that are null."""
    if isinstance(value, dict):
        return {key: _bare(item) for key, item in value.items() if item is not None}
    return [_bare(item) for item in value] if isinstance(value, list) else value


def measured(tokenizer: Any) -> tuple[list[str], list[str], int, float]:
    """Answers misread, those not told apart, the number of the others, and milliseconds."""
    derivation._known.clear()
    begun = time.process_time()
    derive_format(tokenizer)
    spent_ms = 1000 * (time.process_time() - begun)
    made = Template(tokenizer)
    misread = list[str]()
    alike = list[str]()
    for name, one in ANSWERS.items():
        if made.reads(one):
            continue
        kind = made.same_as(one)
        alike += [f"{name} = {kind}"] if kind else []
        misread += [] if kind else [name]
    return misread, alike, len(ANSWERS) - len(alike), spent_ms


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def main() -> int:
    """Print a line for each template; the number of misread answers."""
    n_read = n_written = 0
    for template in TEMPLATES:
        with TemporaryDirectory() as folder:
            tokenizer = tokenizer_of(template, Path(folder))
        misread, alike, n, spent_ms = measured(tokenizer)
        n_read = n_read + n - len(misread)
        n_written = n_written + n
        _say(f"{template.stem}: {n - len(misread)} of {n} read, derived in {spent_ms:.0f} ms")
        for kind, found in (("misread", misread), ("not told apart", alike)):
            if found:
                _say(f"    {kind}: {'; '.join(found)}")
    _say(f"{n_read} of {n_written} answers that are written are read")
    return n_written - n_read


if __name__ == "__main__":
    sys.exit(main())
