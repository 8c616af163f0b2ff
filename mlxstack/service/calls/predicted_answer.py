"""Answer that a client predicts, from which the engine drafts."""

from mlxstack.core.errors import BadRequest, TooLong
from mlxstack.service.parts.generation_options import GenerationOptions
from mlxstack.service.parts.text_processor import TextProcessor
from mlxstack.service.service import Service
from mlxstack.text.prompt.prompt import TokenizeOptions


async def predicted_tokens(
    service: Service, text_processor: TextProcessor, options: GenerationOptions
) -> tuple[int, ...]:
    """Tokens of the predicted answer, where drafts are made.

    Raises BadRequest for too many.
    """
    if not service.engine.snapshot().is_drafting:
        return ()
    param = "prediction.content"
    too_long = BadRequest(f"{param} is longer than the context of {service.n_ctx} tokens", param)
    try:
        plain = TokenizeOptions(parse_special=False)
        tokens = await text_processor.tokenize(options.predicted_text, plain)
    except TooLong:
        raise too_long from None
    if len(tokens) > service.n_ctx:
        raise too_long
    text_processor.refuse_rowless(tokens, param)
    return tokens
