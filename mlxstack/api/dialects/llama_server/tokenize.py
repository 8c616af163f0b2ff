"""Tokenizer and chat template routes."""

from functools import partial
from typing import Any

from litestar import post
from litestar.params import JSONBody
from msgspec import Struct

from mlxstack.api.dialects.openai_chat import to_conversation
from mlxstack.api.dialects.openai_chat.request_schema import ChatBody
from mlxstack.api.run_generation import TheService
from mlxstack.text.prompt.prompt import TokenizeOptions


class TokenizeBody(Struct):
    """POST /tokenize; `content` is text, or texts and token ids."""

    content: str | list[str | int] | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(Struct):
    """POST /detokenize."""

    tokens: list[int] | None = None


@post("/tokenize", status_code=200)
async def tokenize(service: TheService, data: JSONBody[TokenizeBody]) -> dict[str, Any]:
    """Tokenize text, with the piece of each token on request."""
    text_processor = service.text_processor
    parts = [data.content] if isinstance(data.content, str) else data.content or []
    tokens: list[int] = []
    for i, part in enumerate(parts):
        if isinstance(part, int):
            text_processor.check([part], "content")
            tokens.append(part)
        else:
            tokens += await text_processor.tokenize(part, _spelling(data, is_first=i == 0))
    if not data.with_pieces:
        return {"tokens": tokens}
    pieces = await text_processor.pieces(tokens)
    return {"tokens": [{"id": id_, "piece": p} for id_, p in zip(tokens, pieces, strict=True)]}


@post("/detokenize", status_code=200)
async def detokenize(service: TheService, data: JSONBody[DetokenizeBody]) -> dict[str, str]:
    """Convert tokens to text."""
    tokens = service.text_processor.vocabulary_ids(data.tokens or [])
    service.text_processor.check(tokens, "tokens")
    return {"content": await service.text_processor.detokenize(tokens)}


@post("/apply-template", status_code=200)
async def apply_template(service: TheService, data: JSONBody[ChatBody]) -> dict[str, str]:
    """Render a chat body to its prompt."""
    text_processor = service.text_processor
    conversation = await text_processor.read(partial(to_conversation.conversation, data))
    return {"prompt": await text_processor.text(conversation)}


def _spelling(body: TokenizeBody, is_first: bool) -> TokenizeOptions:
    return TokenizeOptions(
        add_special=bool(body.add_special) and is_first,
        parse_special=body.parse_special is not False,
    )


ROUTES: list[Any] = [tokenize, detokenize, apply_template]
