"""Assembly of the text side of one model."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from msgspec import Struct

from mlxstack.core.interfaces import ImageProcessor
from mlxstack.features.formats.answer_format import ModelAnswerFormat
from mlxstack.features.formats.turn_ends import turn_ends
from mlxstack.features.replay.replay import ReplaySplicer
from mlxstack.features.vision.images.image_splicer import ImageMarks, ImageSplicer
from mlxstack.text.prompt.prompt import PromptMaker
from mlxstack.text.prompt.report import TemplateReport, report
from mlxstack.text.template.adaptation import TemplateCapabilities
from mlxstack.text.template.chat_template import ChatTemplate
from mlxstack.text.template.tool_losses import LostPart, tool_losses
from mlxstack.text.template.variables import TemplateVariables
from mlxstack.text.tokens.cached_tokenizer import CachedTokenizer
from mlxstack.text.tokens.special_tokens import special_tokens_of


class ModelText(Struct, frozen=True):
    """Parts that make prompts and read answers of one model, made once."""

    prompt_maker: PromptMaker
    answer_format: ModelAnswerFormat
    images: ImageSplicer
    replay: ReplaySplicer


def assemble_text(
    tokenizer: Any,
    thinking_default: bool | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    n_ctx: int | None = None,
    processor: ImageProcessor | None = None,
) -> ModelText:
    """Text side of a mlx-lm TokenizerWrapper.

    `thinking_default` None lets a model think if it can. `template_kwargs` are the preset's
    variables of the chat template. Without a `processor` the model takes no images.
    """
    answer_format = ModelAnswerFormat(tokenizer)
    special_tokens = special_tokens_of(tokenizer, answer_format)
    encoder = CachedTokenizer(tokenizer, special_tokens)
    image_marks = None if processor is None else ImageMarks(processor)
    template = ChatTemplate(tokenizer, special_tokens, answer_format.report.reasoning, image_marks)
    images = ImageSplicer(encoder, template, processor)
    replay = ReplaySplicer(encoder, template, answer_format)
    prompt_maker = PromptMaker(
        encoder,
        template,
        TemplateVariables(template.switches, thinking_default, template_kwargs),
        answer_format,
        (images, replay),
        n_ctx,
    )
    return ModelText(prompt_maker, answer_format, images, replay)


def template_report(tokenizer: Any) -> TemplateReport:
    """Report on the template of a TokenizerWrapper. Raises Unsupported without one."""
    text = assemble_text(tokenizer)
    return report(text.prompt_maker, text.answer_format, tokenizer)


def template_tool_losses(tokenizer: Any) -> tuple[tuple[LostPart, ...], tuple[LostPart, ...]]:
    """Parts that a template loses as it is, and that prompts lose."""
    text = assemble_text(tokenizer)
    template = text.prompt_maker.template
    added = tokenizer.added_tokens_decoder
    turn_ends = [added[token].content for token in tokenizer.eos_token_ids if token in added]
    as_written, adapted = (
        tool_losses(partial(template.rendered, capabilities), turn_ends)
        for capabilities in (TemplateCapabilities(), template.capabilities)
    )
    return as_written, adapted


def template_ends(tokenizer: Any, n_ids: int) -> set[int]:
    """Tokens below `n_ids` that end an answer by the template. Raises TemplateOverrun."""
    return turn_ends(tokenizer, n_ids)
