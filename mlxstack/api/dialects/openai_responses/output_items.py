"""An item of a response while it is being said: the events of its beginning, growth and end."""

from collections.abc import Iterator
from uuid import uuid4

import msgspec
from msgspec import UNSET

from mlxstack.api.dialects.openai_responses import events
from mlxstack.api.dialects.openai_responses.encrypted_reasoning import encode
from mlxstack.api.dialects.openai_responses.events import ResponsesEvent
from mlxstack.api.dialects.openai_responses.response_schema import (
    CustomCallItem,
    FunctionCallItem,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Status,
)
from mlxstack.api.dialects.openai_responses.tool_names import INPUT, ClientTool, ToolKind
from mlxstack.api.logprobs import SampledLogprob
from mlxstack.service.response_parts import ToolCallPart


class MessageItemStream:
    """Words of the answer."""

    def __init__(self, index: int) -> None:
        self._id, self._index = f"msg_{uuid4().hex}", index
        self._texts: list[str] = []
        self._logprobs: list[SampledLogprob] = []

    def begin(self) -> Iterator[ResponsesEvent]:
        """The item and its one part, both empty."""
        item = MessageItem(self._id, "in_progress")
        yield events.ItemAdded(output_index=self._index, item=item)
        part = OutputText("")
        yield events.PartAdded(item_id=self._id, output_index=self._index, part=part)

    def add(self, text: str, logprobs: tuple[SampledLogprob, ...]) -> Iterator[ResponsesEvent]:
        """More words."""
        self._texts.append(text)
        self._logprobs += logprobs
        yield events.OutputTextDelta(
            item_id=self._id, output_index=self._index, delta=text, logprobs=logprobs
        )

    def end(self, status: Status) -> Iterator[ResponsesEvent]:
        """The whole text, three times: as the protocol wants it."""
        item = self.item(status)
        part = item.content[0]
        yield events.TextDone(
            item_id=self._id, output_index=self._index, text=part.text, logprobs=part.logprobs
        )
        yield events.PartDone(item_id=self._id, output_index=self._index, part=part)
        yield events.ItemDone(output_index=self._index, item=item)

    def item(self, status: Status) -> MessageItem:
        """What has been said so far."""
        text = OutputText("".join(self._texts), logprobs=tuple(self._logprobs))
        return MessageItem(self._id, status, (text,))


class ReasoningItemStream:
    """Thinking before the answer, or between calls."""

    def __init__(self, index: int, *, is_sealed: bool) -> None:
        self._id, self._index = f"rs_{uuid4().hex}", index
        self._is_sealed = is_sealed
        self._texts: list[str] = []

    def begin(self) -> Iterator[ResponsesEvent]:
        """The item, empty."""
        item = ReasoningItem(self._id, "in_progress")
        yield events.ItemAdded(output_index=self._index, item=item)

    def add(self, text: str, _: tuple[SampledLogprob, ...]) -> Iterator[ResponsesEvent]:
        """More thoughts."""
        self._texts.append(text)
        yield events.ReasoningDelta(item_id=self._id, output_index=self._index, delta=text)

    def end(self, status: Status) -> Iterator[ResponsesEvent]:
        """All thoughts."""
        item = self.item(status)
        yield events.ReasoningDone(
            item_id=self._id, output_index=self._index, text=item.content[0].text
        )
        yield events.ItemDone(output_index=self._index, item=item)

    def item(self, status: Status) -> ReasoningItem:
        """What has been thought so far."""
        text = "".join(self._texts)
        return ReasoningItem(
            id=self._id,
            status=status,
            content=(ReasoningText(text),),
            encrypted_content=encode(text) if self._is_sealed else None,
        )


Stretch = MessageItemStream | ReasoningItemStream


def call(
    called: ToolCallPart, offer: ClientTool, index: int
) -> tuple[list[ResponsesEvent], OutputItem]:
    """The events of a complete call, and its item."""
    if offer.kind is ToolKind.CUSTOM:
        return _custom_call(called, offer, index)
    return _function_call(called, offer, index)


def _function_call(
    called: ToolCallPart, offer: ClientTool, index: int
) -> tuple[list[ResponsesEvent], OutputItem]:
    arguments = msgspec.json.encode(called.arguments).decode()
    item = FunctionCallItem(
        f"fc_{uuid4().hex}", called.id, offer.name, "in_progress", "", offer.namespace or UNSET
    )
    done = msgspec.structs.replace(item, status="completed", arguments=arguments)
    return [
        events.ItemAdded(output_index=index, item=item),
        events.ArgumentsDelta(item_id=item.id, output_index=index, delta=arguments),
        events.ArgumentsDone(
            item_id=item.id, output_index=index, name=offer.name, arguments=arguments
        ),
        events.ItemDone(output_index=index, item=done),
    ], done


def _custom_call(
    called: ToolCallPart, offer: ClientTool, index: int
) -> tuple[list[ResponsesEvent], OutputItem]:
    said = called.arguments.get(INPUT)
    text = said if isinstance(said, str) else msgspec.json.encode(called.arguments).decode()
    item = CustomCallItem(
        f"ctc_{uuid4().hex}", called.id, offer.name, "in_progress", "", offer.namespace or UNSET
    )
    done = msgspec.structs.replace(item, status="completed", input=text)
    return [
        events.ItemAdded(output_index=index, item=item),
        events.CustomInputDelta(item_id=item.id, output_index=index, delta=text),
        events.InputDone(item_id=item.id, output_index=index, input=text),
        events.ItemDone(output_index=index, item=done),
    ], done
