"""Renders llama-server's completions, whole and as a stream."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET, to_builtins

from mlxstack.api import streaming
from mlxstack.api.dialects.llama_server.request_schema import LlamaCompletionBody
from mlxstack.api.dialects.llama_server.response_schema import Answer, generation_settings
from mlxstack.api.dialects.openai_chat.response_schema import prompt_progress
from mlxstack.api.error_bodies import llama_error
from mlxstack.api.prompts import Prompt
from mlxstack.api.response_fields import Stopwatch, logprobs, timings
from mlxstack.core.engine_events import FinishReason, TokenSampled
from mlxstack.core.errors import StackError
from mlxstack.core.image import MediaText
from mlxstack.core.response_parts import (
    CollectedResponse,
    ContentPart,
    GenerationFinished,
    KeepAlive,
    PrefillProgressed,
    ResponsePart,
)
from mlxstack.service.calls.generation import Generation

STOP_TYPES = {
    FinishReason.EOS: "eos",
    FinishReason.WORD: "word",
    FinishReason.LENGTH: "limit",
    FinishReason.CONTEXT: "limit",
    FinishReason.LOOP: "limit",
}


class LlamaRenderer(streaming.Renderer):
    """Renders the answers to all prompts of one request."""

    def __init__(self, prompts: Sequence["PromptRenderer"]) -> None:
        self._prompts = prompts

    def whole(self, replies: Sequence[CollectedResponse]) -> Answer:
        """One object for a single prompt, else a list, as llama-server."""
        answers = [
            renderer.whole(reply) for renderer, reply in zip(self._prompts, replies, strict=True)
        ]
        return answers if len(answers) > 1 else answers[0]

    def render(self, index: int, part: ResponsePart) -> list[bytes]:
        return self._prompts[index].render(part)

    def failure(self, error: StackError) -> bytes:
        return streaming.frame(llama_error(error, ""))


@dataclass
class PromptRenderer:
    """Renders the response to the prompt number `index`, counting its tokens."""

    model: str
    generation: Generation
    prompt: Prompt
    body: LlamaCompletionBody
    index: int
    _has_new_line: bool = False
    _n_predicted: int = 0
    _watch: Stopwatch = field(default_factory=lambda: Stopwatch(time.monotonic))

    def whole(self, reply: CollectedResponse) -> dict[str, Any]:
        """Response to a request that does not stream."""
        self._has_new_line = "\n" in reply.content
        tokens = []
        if self.body.return_tokens:
            tokens = [note.token for note in reply.notes]
        answer = self._final(reply.ended, reply.content, tokens)
        return self._picked({**answer, **self._probabilities(reply.notes)})

    def render(self, part: ResponsePart) -> list[bytes]:
        self._watch.count(part)
        match part:
            case KeepAlive():
                return [streaming.keepalive(part.n_done, part.n_prompt)]
            case PrefillProgressed():
                progress = prompt_progress(part)
                return [streaming.frame({**self._partial("", ()), "prompt_progress": progress})]
            case ContentPart():
                return [streaming.frame(self._content(part))]
            case GenerationFinished():
                return [streaming.frame(self._picked(self._final(part, "", [])))]
        return []

    def _content(self, part: ContentPart) -> dict[str, Any]:
        self._has_new_line |= "\n" in part.text
        self._n_predicted += len(part.notes)
        timed = {}
        if self.body.timings_per_token:
            timed["timings"] = self._watch.timings()
        return {**self._partial(part.text, part.notes), **self._probabilities(part.notes), **timed}

    def _partial(self, text: str, notes: tuple[TokenSampled, ...]) -> dict[str, Any]:
        return {
            "index": self.index,
            "content": text,
            "tokens": [note.token for note in notes],
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": self._n_predicted,
            "tokens_evaluated": len(self.generation.request.tokens),
        }

    def _final(self, ended: GenerationFinished, content: str, tokens: list[int]) -> dict[str, Any]:
        work = ended.work
        loops = {"loops": work.loops} if work.loops else {}
        return {
            "index": self.index,
            "content": content,
            "tokens": tokens,
            "id_slot": ended.slot,
            "stop": True,
            "model": self.model,
            "tokens_predicted": work.n_generated,
            "tokens_evaluated": work.n_prompt,
            "generation_settings": generation_settings(
                self.generation.request, self.generation.options.stop, bool(self.body.stream)
            ),
            "prompt": self._text(),
            "has_new_line": self._has_new_line,
            "truncated": False,
            "stop_type": STOP_TYPES[ended.ending],
            "stopping_word": ended.stop_string or "",
            "tokens_cached": work.n_prompt + max(0, work.n_generated - 1),
            "timings": timings(work),
            **loops,
        }

    def _text(self) -> str:
        text = self.prompt.text if isinstance(self.prompt, MediaText) else self.prompt
        if isinstance(text, str):
            return text
        return self.generation.text_processor.decode(self.generation.request.tokens)

    def _picked(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Requested fields by their paths, all without a list."""
        if not self.body.response_fields:
            return answer
        plain = to_builtins(answer)
        selected = {path: _at(plain, path) for path in self.body.response_fields}
        return {path: value for path, value in selected.items() if value is not UNSET}

    def _probabilities(self, notes: tuple[TokenSampled, ...]) -> dict[str, Any]:
        result = logprobs(notes, self.generation.text_processor)
        if result:
            return {"completion_probabilities": result.content}
        return {}


def _at(answer: Any, path: str) -> Any:
    """Value at a path of keys, UNSET if there is none."""
    for key in path.split("/"):
        if not isinstance(answer, dict) or key not in answer:
            return UNSET
        answer = answer[key]
    return answer
