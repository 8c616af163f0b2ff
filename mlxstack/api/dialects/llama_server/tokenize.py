"""Tokenizer and chat template routes."""

from functools import partial
from typing import Any

from litestar import post
from litestar.params import JSONBody
from msgspec import Struct, field

from mlxstack.api.dialects.openai_chat import to_conversation
from mlxstack.api.dialects.openai_chat.messages import ChatMessageParam
from mlxstack.api.dialects.openai_chat.request_schema import ChatBody
from mlxstack.api.run_generation import TheService
from mlxstack.service.parts.text_processor import TextProcessor
from mlxstack.text.prompt.prompt import TokenizeOptions


class TokenizeBody(ChatBody, kw_only=True):
    """POST /tokenize: llama-server's `content`, vLLM's `prompt`, or a chat.

    `content` is text, or texts and token ids.
    """

    messages: list[ChatMessageParam] = field(default_factory=list)
    prompt: str | None = None
    content: str | list[str | int] | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(Struct):
    """POST /detokenize."""

    tokens: list[int] | None = None


@post("/tokenize", status_code=200)
async def tokenize(service: TheService, data: JSONBody[TokenizeBody]) -> dict[str, Any]:
    """Tokenize text or a chat, with the piece of each token on request."""
    text_processor = service.text_processor
    tokens = await _tokens(text_processor, data)
    counts = {"count": len(tokens), "max_model_len": service.n_ctx}
    if not data.with_pieces:
        return {"tokens": tokens, **counts}
    piece = text_processor.prompt_maker.piece
    pieces = await text_processor.run(lambda: [piece(token) for token in tokens])
    rows = [{"id": id_, "piece": piece} for id_, piece in zip(tokens, pieces, strict=True)]
    return {"tokens": rows, **counts}


@post("/detokenize", status_code=200)
async def detokenize(service: TheService, data: JSONBody[DetokenizeBody]) -> dict[str, str]:
    """Convert tokens to text."""
    text_processor = service.text_processor
    tokens = text_processor.prompt_maker.vocabulary_ids(data.tokens or [])
    text_processor.check(tokens, "tokens")
    return {"content": await text_processor.run(partial(text_processor.decode, tokens))}


@post("/apply-template", status_code=200)
async def apply_template(service: TheService, data: JSONBody[ChatBody]) -> dict[str, str]:
    """Render a chat body to its prompt."""
    text_processor = service.text_processor
    conversation = await text_processor.read(partial(to_conversation.conversation, data))
    render = partial(text_processor.prompt_maker.text, conversation)
    return {"prompt": await text_processor.run(render)}


async def _tokens(text_processor: TextProcessor, body: TokenizeBody) -> list[int]:
    if body.messages:
        chat = await text_processor.read(partial(to_conversation.conversation, body))
        return list((await text_processor.prompt(chat)).tokens)
    content = body.prompt if body.content is None else body.content
    tokens: list[int] = []
    for i, part in enumerate([content] if isinstance(content, str) else content or []):
        if isinstance(part, int):
            text_processor.check([part], "content")
            tokens.append(part)
        else:
            tokens += await text_processor.tokenize(part, _options(body, is_first=i == 0))
    return tokens


def _options(body: TokenizeBody, is_first: bool) -> TokenizeOptions:
    # Without a word on it vLLM adds the beginning of the text to a `prompt`.
    is_vllm = body.content is None and body.add_special_tokens is not False
    return TokenizeOptions(
        add_special=bool(body.add_special or is_vllm) and is_first,
        parse_special=body.parse_special is not False,
    )
