"""Sampled answers and calls in place of rendered ones."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from mlxstack.core.conversation import Conversation
from mlxstack.core.errors import BadRequest
from mlxstack.core.interfaces import AnswerFormat
from mlxstack.core.response_parts import CallBlock
from mlxstack.features.replay.answer_replay import AnswerReplay, AnswerSplicer, histories
from mlxstack.features.replay.splices import CallSplicer
from mlxstack.text.prompt.splicer import PromptSplicer, SampledAnswer, Scope, merged
from mlxstack.text.template.chat_template import PROBE_CALL, ChatTemplate
from mlxstack.text.tokens.cached_tokenizer import CachedTokenizer, Prompt, Splice, common_length


class ReplaySplicer(PromptSplicer):
    """Remembered answers, and calls of all other turns. Thread-safe."""

    def __init__(
        self, encoder: CachedTokenizer, template: ChatTemplate, answer_format: AnswerFormat
    ) -> None:
        self.answers = AnswerReplay()
        self._answer_splicer = AnswerSplicer(encoder, template.write, answer_format.marks)
        self._call_splicer = CallSplicer(encoder, template, answer_format.call_markers)
        self.calls = self._call_splicer.replay
        self._encoder = encoder
        self._template = template

    def splices(
        self, scope: Scope, conversation: Conversation, adapted: Conversation, rendering: str
    ) -> Sequence[Splice]:
        """Remembered answers and calls of a rendering, in order."""
        entries = self.answers.known(scope, conversation.messages)
        answers = self._answer_splicer.splices(conversation, entries, rendering)
        n_calling = sum(bool(message.tool_calls) for message in conversation.messages)
        if len(answers) >= n_calling:
            return answers
        return merged(answers, self._call_splicer.splices(scope, adapted, rendering))

    def prompt_fields(
        self, conversation: Conversation, prompt: Prompt, end: int | None
    ) -> dict[str, Any]:
        """Where the answer begins, and a digest of the messages before it."""
        return {
            "answer_at": self._answer_start(conversation, prompt, end),
            "history": histories(conversation.messages)[-1],
        }

    def remember_calls(self, scope: Scope, block: CallBlock) -> None:
        """Remember sampled calls for later prompts."""
        self.calls.remember(scope, block)

    def remember_answer(self, scope: Scope, prompt: Prompt, answer: SampledAnswer) -> None:
        """Remember a sampled answer for later prompts."""
        self.answers.remember(scope, prompt, answer)

    def _answer_start(
        self, conversation: Conversation, prompt: Prompt, end: int | None
    ) -> tuple[int, int] | None:
        """Character and token where the answer begins; None if unknown."""
        if not conversation.add_generation_prompt or conversation.continue_final:
            return None
        if end is None:
            ended = replace(conversation, add_generation_prompt=False)
            end = common_length(prompt.marked, self._template.write_cautiously(ended)[1])
            if end == len(prompt.marked):
                end = self._length_before_call(ended, prompt)
        n_before = self._encoder.exact_place(prompt, end)
        if n_before is None:
            return None
        return end, n_before

    def _length_before_call(self, ended: Conversation, prompt: Prompt) -> int:
        """Prompt length that stays if a call follows.

        Some templates end results otherwise.
        """
        answered = replace(ended, messages=(*ended.messages, PROBE_CALL))
        try:
            end = common_length(prompt.marked, self._template.write(answered))
        except BadRequest:
            return len(prompt.marked)
        if self._encoder.exact_place(prompt, end) is None:
            return prompt.chars[prompt.piece_at(end)]
        return end
