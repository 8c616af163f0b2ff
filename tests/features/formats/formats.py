"""Chat templates of several call formats, in words of their own, with tokenizers that fit them."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec import Struct

from tests.text.conftest import CHATML_SPECIAL, byte_level, loaded

# The reminder holds an empty pair of marks; the call formats are told from the whole template.
SKELETON = """
{%- for m in messages %}
{%- if loop.first and tools %}
{{- '<|im_start|>system\\nTools: ' + (tools | tojson) + '\\nPut calls within REMINDER marks.' }}
{{- (m.content if m.role == 'system' else '') + '<|im_end|>' }}
{%- endif %}
{%- if m.role == 'user' or (m.role == 'system' and not (loop.first and tools)) %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}
{%- endif %}
{%- if m.role == 'assistant' %}
{{- 'OPENING' }}THOUGHTS{{- m.content }}
CALLS
{{- 'ENDING' if m.tool_calls else '<|im_end|>' }}
{%- endif %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>tool\\nAn answer to a call (see REMINDER).\\n' + m.content + '<|im_end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'OPENING' }}{%- endif %}
"""
EACH = "{%- for c in m.tool_calls or [] %}{%- set f = c.function %}"
PAIRS = "{%- for k, v in f.arguments.items() %}"
TEXT = "(v if v is string else v | tojson)"


class Format(Struct, frozen=True):
    """How calls are written; `reminder` is an empty pair of marks, as prose mentions it."""

    calls: str
    special: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    reminder: str = "<tool_call></tool_call>"
    ending: str = "<|im_end|>"
    opening: str = "<|im_start|>assistant\\n"
    thoughts: str = ""


TOOL_CALL = ("<tool_call>", "</tool_call>")
SECTION = tuple(
    f"<|tool_call{name}|>"
    for name in ("s_section_begin", "s_section_end", "_begin", "_argument_begin", "_end")
)
FORMATS = {
    "json": Format(
        EACH + """{%- set tool_call = f %}{{- '<tool_call>\\n{"name": "' + tool_call.name }}"""
        """{{- '", "arguments": ' + (f.arguments | tojson) + '}\\n</tool_call>' }}{%- endfor %}""",
        added=TOOL_CALL,
    ),
    "coder": Format(
        EACH + "{{- '<tool_call>\\n<function=' + f.name + '>\\n' }}" + PAIRS
        + "{{- '<parameter=' + k + '>\\n' + " + TEXT + " + '\\n</parameter>\\n' }}{%- endfor %}"
        "{{- '</function>\\n</tool_call>' }}{%- endfor %}",
        added=TOOL_CALL,
    ),
    "keys": Format(
        EACH + "{{- '<tool_call>' + f.name }}" + PAIRS
        + "{{- '<arg_key>' + k + '</arg_key><arg_value>' + " + TEXT + " + '</arg_value>' }}"
        "{%- endfor %}{{- '</tool_call>' }}{%- endfor %}",
        added=(*TOOL_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "section": Format(
        "{%- if m.tool_calls %}{{- '<|tool_calls_section_begin|>' }}" + EACH
        + "{{- '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' }}"
        "{{- (f.arguments | tojson) + '<|tool_call_end|>' }}{%- endfor %}"
        "{{- '<|tool_calls_section_end|>' }}{%- endif %}",
        special=SECTION,
        reminder="<|tool_calls_section_begin|><|tool_calls_section_end|>",
    ),
    "quoted": Format(
        EACH + "{{- '<|tool_call>call:' + f.name + '{' }}" + PAIRS
        + """{{- k + ':' + ('<|"|>' + v + '<|"|>' if v is string else v | tojson) }}"""
        "{{- '' if loop.last else ',' }}{%- endfor %}{{- '}<tool_call|>' }}{%- endfor %}",
        special=("<|tool_call>", "<tool_call|>", '<|"|>'),
        reminder="<|tool_call><tool_call|>",
    ),
    "endless": Format(
        EACH + "{{- '[TOOL_CALLS]' + f.name + '[ARGS]' + (f.arguments | tojson) }}{%- endfor %}",
        special=("[TOOL_CALLS]", "[ARGS]"),
        reminder="[TOOL_CALLS]",
    ),
    "letters": Format(
        EACH + """{{- '<function name="' + f.name + '">' }}""" + PAIRS
        + """{{- '<param name="' + k + '">' + """ + TEXT + """ + '</param>' }}{%- endfor %}"""
        "{{- '</function>' }}{%- endfor %}",
        reminder='<function name="a"></function>',
    ),
    "channels": Format(
        EACH + "{{- '<|channel|>commentary to=functions.' + f.name }}"
        "{{- ' <|constrain|>json<|message|>' + (f.arguments | tojson) }}{%- endfor %}",
        special=("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>"),
        reminder="<|channel|>commentary to=functions.x<|message|><|call|>",
        ending="<|call|>",
        opening="<|start|>assistant",
    ),
}  # fmt: skip


def template_of(form: Format) -> str:
    """The whole template of a format."""
    template = SKELETON
    for word, text in (
        ("REMINDER", form.reminder),
        ("\nCALLS\n", f"\n{form.calls}\n"),
        ("ENDING", form.ending),
        ("THOUGHTS", form.thoughts),
        ("OPENING", form.opening),
    ):
        template = template.replace(word, text)
    return template


@cache
def tokenizer_of(name: str) -> Any:
    """The tokenizer of a format, as mlx-lm loads a model's."""
    return made_tokenizer(FORMATS[name])


def made_tokenizer(form: Format, template: str = "") -> Any:
    """The tokenizer of any format, or of a whole template."""
    made = byte_level([*CHATML_SPECIAL, *form.special], list(form.added))
    with TemporaryDirectory() as folder:
        return loaded(Path(folder), made, template or template_of(form), {"eos_token": form.ending})


def respelled(tokenizer: Any, text: str, widths: Callable[[], int]) -> list[int]:
    """The text in other tokens than its encoding: short pieces, with the special tokens whole."""
    marks = {token.content: at for at, token in tokenizer.added_tokens_decoder.items()}
    tokens: list[int] = []
    while text:
        mark = next((mark for mark in marks if text.startswith(mark)), None)
        if mark is not None:
            tokens.append(marks[mark])
            text = text[len(mark) :]
            continue
        nearest = min((at for mark in marks if (at := text.find(mark)) > 0), default=len(text))
        n_chars = min(widths(), nearest)
        tokens += tokenizer.encode(text[:n_chars], add_special_tokens=False)
        text = text[n_chars:]
    return tokens
