"""Routes of legacy completions: raw prompts, one choice for each."""

from litestar import Response, post
from litestar.params import JSONBody
from litestar.response import Stream
from msgspec import structs

from mlxstack.api import request_fields
from mlxstack.api.dialects.openai_completions.schema import CompletionBody, TextCompletion
from mlxstack.api.dialects.openai_completions.stream import CompletionRenderer
from mlxstack.api.disconnect import cancel_on_disconnect
from mlxstack.api.openapi import response_spec
from mlxstack.api.prompts import read_prompts
from mlxstack.api.request_fields import resolve_model
from mlxstack.api.run_generation import AnyRequest, TheService, answer, check_all, copies, n_choices
from mlxstack.core.errors import BadRequest
from mlxstack.service.calls.admission import admit_text
from mlxstack.service.parts.generation_options import GenerationOptions
from mlxstack.service.service import Service


@post(
    ["/v1/completions", "/api/v0/completions", "/v1/batch/completions"],
    status_code=200,
    responses=response_spec(TextCompletion),
)
async def completions(
    request: AnyRequest, data: JSONBody[CompletionBody], service: TheService
) -> Response[TextCompletion] | Stream:
    """Continue one or several texts, whole or as server-sent events."""
    prompts = read_prompts(data.prompt)
    check_all(len(prompts), n_choices(data.n, service.preset.slots.count), service)
    shape = CompletionRenderer(service, resolve_model(service, data.model), data, len(prompts))
    options = _options(data, request, service)
    orders = [
        await cancel_on_disconnect(
            request, admit_text(service, prompt, structs.replace(options, id=f"{shape.id}-{i}"))
        )
        for i, prompt in enumerate(prompts)
    ]
    groups = [copies(generation, shape.n) for generation in orders]
    return await answer(request, service, groups, shape, bool(data.stream))


def _options(body: CompletionBody, request: AnyRequest, service: Service) -> GenerationOptions:
    request_fields.refuse(body, ("echo", "suffix"))
    if body.best_of not in (None, body.n or 1):
        raise BadRequest("best_of is not supported; n gives that many choices", "best_of")
    n_top = None if body.logprobs is None or body.logprobs is False else int(body.logprobs)
    return request_fields.options(body, "", n_top, request, service)
