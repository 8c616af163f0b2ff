"""Warms the prefixes of a preset and those that conversations shared."""

import asyncio
import json
import logging
from functools import partial
from pathlib import Path

import msgspec

from mlxstack.core.conversation import Conversation, Message
from mlxstack.core.errors import BadRequest
from mlxstack.core.preset import WarmPrefix
from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.service.calls import prefix_cache_admin
from mlxstack.service.parts.text_processor import TextProcessor
from mlxstack.service.service import Service
from mlxstack.text.images.reader import ImageReader
from mlxstack.text.prompt.prompt import TokenizeOptions

log = logging.getLogger(__name__)


async def warm_all(service: Service) -> None:
    """Compute and pin the preset's prefixes and learned ones; failures are logged."""
    for prefix in service.preset.prefix_cache.warm_prefixes:
        try:
            text_processor = service.text_processor
            prompt = await _prompt(service, text_processor, prefix)
            target = prefix_cache_admin.Prefix(prompt, text_processor)
            pinned = await prefix_cache_admin.pin(service, prefix.name, target)
            log.info("warmed %s: %d tokens", pinned.name, pinned.n_tokens)
        except Exception as error:
            log.warning("the prefix %s was not warmed: %s", prefix.name, error)
    try:
        n_prefixes = await prefix_cache_admin.warm_learned(service)
        log.info("warmed %d shared prefixes", n_prefixes)
    except Exception as error:
        log.warning("learned shared prefixes were not warmed: %s", error)


async def _prompt(
    service: Service, text_processor: TextProcessor, prefix: WarmPrefix
) -> PromptTokens:
    file = prefix.tokens_file or prefix.text_file or prefix.messages_file or ""
    text = await asyncio.to_thread(_read, file)
    if prefix.tokens_file is not None:
        tokens = json.loads(text)
        if not isinstance(tokens, list) or not all(isinstance(t, int) for t in tokens):
            raise BadRequest(f"{file} is not a JSON list of token ids")
        text_processor.check(tokens, "tokens_file")
        return PromptTokens(tuple(tokens))
    if prefix.text_file is not None:
        tokenized = await text_processor.tokenize(text, TokenizeOptions(add_special=False))
        return PromptTokens(tokenized)
    messages = await text_processor.read(partial(_messages, service, file, text))
    return await text_processor.prompt(Conversation(messages, add_generation_prompt=False))


def _messages(service: Service, file: str, text: str, images: ImageReader) -> tuple[Message, ...]:
    """Messages of a file, read as those of a request. Raises BadRequest."""
    try:
        return service.read_messages(text, images)
    except msgspec.MsgspecError as error:
        raise BadRequest(f"{file} is not a JSON list of chat messages: {error}") from None


def _read(path: str) -> str:
    return Path(path).expanduser().read_text()
