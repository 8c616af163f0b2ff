"""Routes of llama-server: raw completions, slots, tokenizer, health."""

from uuid import uuid4

from litestar import Response, post
from litestar.params import JSONBody
from litestar.response import Stream
from msgspec import structs

from mlxstack.api import request_fields
from mlxstack.api.dialects.llama_server.request_schema import LlamaCompletionBody
from mlxstack.api.dialects.llama_server.response_schema import Answer
from mlxstack.api.dialects.llama_server.stream import LlamaRenderer, PromptRenderer
from mlxstack.api.disconnect import cancel_on_disconnect
from mlxstack.api.openapi import response_spec
from mlxstack.api.prompts import read_prompts
from mlxstack.api.run_generation import AnyRequest, TheService, answer, check_all
from mlxstack.core.errors import Unsupported
from mlxstack.service.calls.admission import admit_text


@post(["/completion", "/completions"], status_code=200, responses=response_spec(Answer))
async def completion(
    request: AnyRequest, data: JSONBody[LlamaCompletionBody], service: TheService
) -> Response[Answer] | Stream:
    """Continue a prompt; several prompts get a list of responses."""
    request_fields.only_one(data.n)
    prompts = read_prompts(data.prompt)
    check_all(len(prompts), 1, service)
    options = request_fields.options(data, "", data.n_probs or None, request, service)
    options = structs.replace(options, has_progress=bool(data.return_progress))
    name = f"cmpl-{uuid4().hex}"
    orders = [
        await cancel_on_disconnect(
            request, admit_text(service, prompt, structs.replace(options, id=f"{name}-{i}"))
        )
        for i, prompt in enumerate(prompts)
    ]
    renderer = LlamaRenderer(
        [
            PromptRenderer(service.name, generation, prompt, data, index)
            for index, (generation, prompt) in enumerate(zip(orders, prompts, strict=True))
        ]
    )
    return await answer(request, service, [orders], renderer, bool(data.stream))


@post("/infill")
async def infill() -> None:
    """Refuse llama-server's endpoint of editors."""
    raise Unsupported(
        "there is no fill-in-the-middle here; send a prompt with the model's own tokens for it to "
        "/completion"
    )
