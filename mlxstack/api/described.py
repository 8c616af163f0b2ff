"""What OpenAPI cannot read off a handler that answers either whole or as a stream."""

from litestar.openapi import ResponseSpec


def described(whole: type[object]) -> dict[int, ResponseSpec]:
    """The shape of the whole answer; a stream carries pieces of the same."""
    words = "The whole answer; with `stream: true`, server-sent events instead."
    return {200: ResponseSpec(data_container=whole, description=words)}
