"""The answer format of GPT-OSS, which mlx-lm does not read yet.

One answer holds several messages, each behind a header:

    <|channel|>analysis<|message|>thoughts<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>answer<|return|>

Headers are dropped, like those of mlx-lm's own formats.
"""

from typing import Any

HEADER = "header"
CALL_START = "to=functions."
CALL_OPENING = f"<|channel|>commentary {CALL_START}"
NEXT_MESSAGE = "<|end|><|start|>assistant"
TURN_START = "<|start|>assistant"
OPTIONAL_MARKS = ("<|constrain|>",)
ANSWER = "<|channel|>final<|message|>"
MARKS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>")
TRANSITIONS = {
    HEADER: [("<|channel|>analysis<|message|>", "reasoning"), ("<|message|>", "normal")],
    "reasoning": [("<|end|>", HEADER)],
    "normal": [("<|end|>", HEADER)],
}
TOOL_TRANSITIONS = {
    **TRANSITIONS,
    HEADER: [(CALL_START, "tool"), *TRANSITIONS[HEADER]],
    "tool": [("<|call|>", HEADER), ("<|end|>", HEADER)],
}


def speaks_harmony(tokenizer: Any) -> bool:
    """Whether the vocabulary has the marks, and mlx-lm no format of its own for the model."""
    vocabulary = tokenizer.get_vocab()
    return not tokenizer.response_transitions and all(mark in vocabulary for mark in MARKS)


def parse_call(text: str, _: Any = None) -> dict[str, Any]:
    """`NAME <|constrain|>json<|message|>{...}` to name and arguments; ValueError if it is not."""
    head, found, arguments = text.partition("<|message|>")
    name = head.replace("<", " ").split(" ", 1)[0].strip()
    if not found or not arguments.strip():
        raise ValueError(f"no arguments in {text!r}")
    return {"name": name, "arguments": arguments}
