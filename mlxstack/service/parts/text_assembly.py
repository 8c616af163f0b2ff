"""Assembly of the text processor of a model."""

from pathlib import Path
from typing import Any

from mlxstack.core.errors import SetupError, TemplateOverrun
from mlxstack.core.interfaces import ImageProcessor
from mlxstack.core.model_info import ModelFacts
from mlxstack.core.preset import Preset, ServiceKind
from mlxstack.features.formats.format_constraints import FormatConstraints
from mlxstack.features.vision.image_checks import ImageInputs
from mlxstack.models.model_files import processor_of
from mlxstack.service.parts.text_processor import TextProcessor
from mlxstack.service.parts.work_threads import ThreadGroup
from mlxstack.text.assembly import assemble_text
from mlxstack.text.tokens.rowless_tokens import RowlessTokens


def text_processor_of(tokenizer: Any, preset: Preset, facts: ModelFacts) -> TextProcessor:
    """Text processor of a loaded model, with images where its files and its engine take them.

    Raises as `assemble_text_processor` does.
    """
    processor = None
    if facts.accepts_images:
        processor = processor_of(Path(facts.path), preset.vision.max_pixels)
    return assemble_text_processor(tokenizer, preset, facts.n_vocab, processor)


def assemble_text_processor(
    tokenizer: Any, preset: Preset, n_vocab: int, processor: ImageProcessor | None = None
) -> TextProcessor:
    """Text processor of a mlx-lm TokenizerWrapper; without a `processor` it takes no images.

    Raises SetupError for a chat template that exceeds its limits already when it is probed.
    """
    try:
        text = assemble_text(
            tokenizer, preset.sampling.thinking, preset.template, preset.slots.n_ctx, processor
        )
    except TemplateOverrun as overrun:
        raise SetupError(
            f"the chat template of {preset.model.id} {overrun.reason}; choose another model"
        ) from overrun
    threads = ThreadGroup()
    rowless = RowlessTokens(tokenizer, n_vocab)
    constraints = FormatConstraints(
        threads,
        text.answer_format,
        n_vocab,
        text.prompt_maker.variables.may_think,
        rowless,
        has_free_rules=preset.structured_output.auto_tool_grammar,
    )
    images = ImageInputs(threads, text.images)
    if preset.kind is ServiceKind.CHAT:
        constraints.load()
    return TextProcessor(
        text, tokenizer, n_vocab, preset.slots.n_ctx, threads, constraints, images, rowless
    )
