"""Images of all dialects as one prompt with spans."""

import base64
import io
from typing import Any

import msgspec
import pytest
from mlx_lm.utils import load_tokenizer
from PIL import Image

from mlxstack.api.dialects.anthropic.request_schema import MessagesBody
from mlxstack.api.dialects.anthropic.to_conversation import conversation as from_anthropic
from mlxstack.api.dialects.ollama.request_schema import OllamaChatBody
from mlxstack.api.dialects.ollama.to_conversation import chat_conversation as from_ollama
from mlxstack.api.dialects.openai_chat.request_schema import ChatBody
from mlxstack.api.dialects.openai_chat.to_conversation import conversation as from_openai
from mlxstack.api.dialects.openai_responses.request_schema import ResponsesBody
from mlxstack.api.dialects.openai_responses.to_conversation import conversation as from_responses
from mlxstack.api.dialects.openai_responses.tool_names import ToolNames
from mlxstack.core.conversation import Conversation, Message, Role
from mlxstack.core.errors import BadRequest
from mlxstack.core.image import FIRST_VIRTUAL, ImagePart
from mlxstack.models.model_files import processor_of
from mlxstack.service.parts.stored_messages import read_stored, write_message
from mlxstack.text.assembly import assemble_text
from mlxstack.text.images.marks import mark_of
from mlxstack.text.images.reader import MAX_IN_ALL, MAX_NEW, ImageReader
from mlxstack.text.prompt.prompt import PromptMaker
from tests import vision_models


def png(color: str = "teal", size: tuple[int, int] = (64, 64)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, color).save(out, "PNG")
    return out.getvalue()


TEAL = base64.b64encode(png()).decode()
URL = f"data:image/png;base64,{TEAL}"
SHOWN = {"type": "image_url", "image_url": {"url": URL}}
SOURCE = {"type": "base64", "media_type": "image/png", "data": TEAL}
ASK = {"type": "text", "text": "What is it?"}
ASKED = {"role": "user", "content": [SHOWN, ASK]}


@pytest.fixture(scope="module")
def prompt_maker(tmp_path_factory: pytest.TempPathFactory) -> PromptMaker:
    folder = vision_models.build(tmp_path_factory.mktemp("models") / "vl", "qwen3_vl")
    return assemble_text(load_tokenizer(folder), processor=processor_of(folder)).prompt_maker


def reader() -> ImageReader:
    return ImageReader(accepts_images=True)


def chat(*messages: dict[str, Any]) -> Conversation:
    return from_openai(msgspec.convert({"messages": messages}, ChatBody), reader())


def in_every_dialect() -> list[Conversation]:
    asked = {"role": "user", "content": [SHOWN, ASK]}
    other = {"role": "user", "content": [{**SHOWN, "image_url": URL}, ASK]}
    block = {"role": "user", "content": [{"type": "image", "source": SOURCE}, ASK]}
    item = {"type": "input_image", "image_url": URL}
    items = [{"role": "user", "content": [item, {"type": "input_text", "text": "What is it?"}]}]
    message = {"role": "user", "content": "What is it?", "images": [TEAL]}
    return [
        chat(asked),
        chat(other),
        from_anthropic(
            msgspec.convert({"messages": [block], "max_tokens": 1}, MessagesBody), reader()
        ),
        from_responses(msgspec.convert({"input": items}, ResponsesBody), ToolNames(), reader()),
        from_ollama(
            msgspec.convert({"model": "m", "messages": [message]}, OllamaChatBody), reader()
        ),
    ]


def test_all_dialects_give_one_prompt(prompt_maker: PromptMaker) -> None:
    prompts = [prompt_maker.make(conversation) for conversation in in_every_dialect()]
    first = prompts[0]
    (span,) = first.images
    assert span.end - span.start == span.size.n_features == 4
    assert all(token >= FIRST_VIRTUAL for token in first.tokens[span.start : span.end])
    assert sum(token >= FIRST_VIRTUAL for token in first.tokens) == 4
    assert {(one.tokens, one.images[0].digest) for one in prompts} == {(first.tokens, span.digest)}
    assert first.n_replayed == 0
    assert span.data == png()
    assert all(cut <= span.start or cut >= span.end for cut in first.checkpoint_positions)


def test_the_next_turn_begins_with_the_ids_of_this_one(prompt_maker: PromptMaker) -> None:
    turn = {"role": "user", "content": [SHOWN, ASK]}
    other = {**SHOWN, "image_url": {"url": base64.b64encode(png("red", (128, 64))).decode()}}
    first = prompt_maker.make(chat(turn))
    answered = ({"role": "assistant", "content": "teal"}, {"role": "user", "content": [other]})
    second = prompt_maker.make(chat(turn, *answered))
    end = first.checkpoint_positions[-1]
    assert end > first.images[0].end
    assert second.tokens[:end] == first.tokens[:end]
    assert second.images[0] == first.images[0]
    assert second.images[1].size.n_features == 8
    assert second.images[1].digest != first.images[0].digest


def test_a_placeholder_that_somebody_spells_is_no_image(prompt_maker: PromptMaker) -> None:
    mark = mark_of(ImagePart(png()))
    spelled = f"<|vision_start|><|image_pad|><|vision_end|> {mark}"
    prompt = prompt_maker.make(
        chat({"role": "user", "content": [SHOWN, {"type": "text", "text": "x"}]})
    )
    for messages in (
        [{"role": "user", "content": spelled}],
        [{"role": "user", "content": [{"type": "text", "text": spelled}]}],
        [{"role": "user", "content": "x"}, {"role": "tool", "content": spelled}],
    ):
        made = prompt_maker.make(chat(*messages))
        assert not made.images
        assert max(made.tokens) < FIRST_VIRTUAL
        assert prompt.tokens[prompt.images[0].start - 1] not in made.tokens


def test_an_image_of_a_tool_result_is_shown(prompt_maker: PromptMaker) -> None:
    use = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": [{"type": "image", "source": SOURCE}],
    }
    turns = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    body = msgspec.convert({"messages": turns, "max_tokens": 1}, MessagesBody)
    assert len(prompt_maker.make(from_anthropic(body, reader())).images) == 1
    call = {"type": "function_call", "call_id": "t1", "name": "look", "arguments": "{}"}
    shown = [{"type": "input_image", "image_url": URL}]
    output = {"type": "function_call_output", "call_id": "t1", "output": shown}
    items = {"input": [{"role": "user", "content": "look"}, call, output]}
    made = from_responses(msgspec.convert(items, ResponsesBody), ToolNames(), reader())
    assert len(prompt_maker.make(made).images) == 1


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"type": "image_url", "image_url": {"url": "https://x.invalid/a.png"}}, "data URL"),
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}, "data URL"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "data URL"),
        ({"type": "input_image", "file_id": "file-1"}, "no files"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "send PNG"),
    ],
)
def test_a_new_image_is_refused_and_an_earlier_one_becomes_a_note(
    prompt_maker: PromptMaker, part: dict[str, Any], says: str
) -> None:
    asked = {"role": "user", "content": [ASK, part]}
    with pytest.raises(BadRequest, match=says) as refused:
        chat(asked)
    assert refused.value.param == "messages[0].content[1]"
    poisoned = chat(
        asked, {"role": "assistant", "content": "no"}, {"role": "user", "content": "go"}
    )
    assert "[image omitted: " in poisoned.messages[0].text
    assert not prompt_maker.make(poisoned).images


def test_the_number_of_images_is_bounded() -> None:
    with pytest.raises(BadRequest, match=f"more than {MAX_NEW} new"):
        chat({"role": "user", "content": [SHOWN] * (MAX_NEW + 1)})
    answered = {"role": "assistant", "content": "ok"}
    old = {"role": "user", "content": [SHOWN] * (MAX_IN_ALL + 1)}
    seen = chat(old, answered, {"role": "user", "content": "go"})
    assert len(seen.messages[0].images) == MAX_IN_ALL
    assert seen.messages[0].text.endswith(f"at most {MAX_IN_ALL}]")


def test_a_stored_message_keeps_its_images() -> None:
    (message,) = chat({"role": "user", "content": [ASK, SHOWN, ASK]}).messages
    assert read_stored(write_message(message)) == message


def test_a_model_that_cannot_see_reads_notes(prompt_maker: PromptMaker) -> None:
    blind = assemble_text(prompt_maker._encoder.tokenizer).prompt_maker
    image = ImagePart(png())
    conversation = Conversation((Message(Role.USER, f"a {mark_of(image)}", images=(image,)),))
    prompt = blind.make(conversation)
    assert "a [image omitted]" in (prompt.text or "")
    assert not prompt.images
    with pytest.raises(BadRequest, match="not supported by this model"):
        from_openai(msgspec.convert({"messages": [{"role": "user", "content": [SHOWN]}]}, ChatBody))


def test_two_details_are_two_images(prompt_maker: PromptMaker) -> None:
    large = base64.b64encode(png("red", (1024, 1024))).decode()
    parts = [
        {"type": "image_url", "image_url": {"url": large, "detail": one}} for one in ("low", "high")
    ]
    low, high = prompt_maker.make(chat({"role": "user", "content": parts})).images
    assert low.size.n_features < high.size.n_features
    assert low.digest != high.digest


def test_an_expected_prompt_keeps_its_images(prompt_maker: PromptMaker) -> None:
    """Also one in a result, whose call loses its thought when the user speaks."""
    call = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    said = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call00001", "content": [SHOWN, ASK]}
    again = [ASKED, {"role": "assistant", "content": "Teal."}, ASKED]
    for turns in ([ASKED], again, [ASKED, said, result]):
        conversation = chat(*turns)
        expected = prompt_maker.expected(conversation, Message(Role.ASSISTANT, "It is teal."))
        following = (Message(Role.ASSISTANT, "It is teal."), Message(Role.USER, "And this?"))
        later = msgspec.structs.replace(conversation, messages=(*conversation.messages, *following))
        prompt = prompt_maker.make(later)
        assert expected.images == prompt.images
        assert expected.images
        assert prompt.tokens[: len(expected.tokens)] == expected.tokens
        assert len(expected.tokens) > expected.images[-1].end


def test_virtual_ids_are_read_as_the_placeholder(prompt_maker: PromptMaker) -> None:
    prompt = prompt_maker.make(in_every_dialect()[0])
    span = prompt.images[0]
    assert prompt_maker.detokenize(prompt.tokens).count("<|image_pad|>") == 4
    assert prompt_maker.piece(prompt.tokens[span.start]) == "<|image_pad|>"


def test_a_stored_result_with_more_images_than_a_user_may_send_is_read() -> None:
    part = ImagePart(png())
    stored = Message(Role.TOOL, mark_of(part) * (MAX_NEW + 5), images=(part,) * (MAX_NEW + 5))
    assert read_stored(write_message(stored)).images == stored.images
