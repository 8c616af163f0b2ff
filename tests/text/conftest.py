"""Small real tokenizers, trained on the spot, loaded the way mlx-lm loads a model's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import load
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "You are a helpful assistant. The quick brown fox jumps over the lazy dog.",
    '{"name": "read_file", "arguments": {"path": "src/main.py", "limit": 10}}',
    "user assistant system tool Hello, world! grüße 日本 def f(x):\n    return x\n",
]

# Qwen-like: Hermes calls, thoughts stripped before the last user turn, late system in place.
CHATML = """
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nWrite <tool_call>\\n{"name": <name>, "arguments": <args>}\\n</tool_call>' }}
{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if m.reasoning_content and loop.index0 > ns.last %}
{{- '<think>\\n' + m.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}
{%- set tool_call = call.function %}
{%- if m.content or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
{%- if tool_call.arguments is string %}{{- tool_call.arguments }}
{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking %}{{- '<think>\\n' }}
{%- else %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

# Mistral-like: system inside the first user turn, strict alternation, ids of nine characters.
MISTRAL = """
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content %}{%- set turns = messages[1:] %}
{%- else %}{%- set turns = messages %}{%- endif %}
{{- bos_token }}
{%- set ns = namespace(index=0) %}
{%- for m in turns %}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != (ns.index % 2 == 0) %}
{{- raise_exception('roles must alternate user and assistant') }}
{%- endif %}{%- set ns.index = ns.index + 1 %}{%- endif %}
{%- if m.role == 'system' %}{{- raise_exception('system comes first') }}{%- endif %}
{%- endfor %}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for m in turns %}
{%- if m.role == 'user' %}
{{- '[INST]' }}
{%- if loop.first and system is defined %}{{- system + '\\n\\n' }}{%- endif %}
{{- m.content + '[/INST]' }}
{%- elif m.tool_calls %}
{{- '[TOOL_CALLS][' }}
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('ids need 9 characters') }}{%- endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- ', "id": "' + call.id + '"}' }}
{%- endfor %}
{{- ']' + eos_token }}
{%- elif m.role == 'assistant' %}{{- m.content + eos_token }}
{%- else %}{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}
"""

# Gemma-like: no system role at all.
PLAIN = """
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{{- '<start_of_turn>' + m.role + '\\n' + (m.content | trim) + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>assistant\\n' }}{%- endif %}
"""

HARMONY = """
{%- for m in messages %}
{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""

HARMONY_SPECIAL = [
    "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>",
]  # fmt: skip
CHATML_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML_ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
CALL_SPECIAL = [
    "[ARGS]", "[TOOL_CALLS]", "<|open|>", "<|close|>", "<|sep|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>",
    "<|constrain|>", "<|message|>", '<|"|>', "<escape>", "<|tool_call_end|>",
]  # fmt: skip
CALL_ADDED = [
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<longcat_arg_key>",
    "</longcat_arg_value>", "</minimax:tool_call>", "<tool_call|>", "<end_function_call>",
]  # fmt: skip
MISTRAL_SPECIAL = [
    "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
]  # fmt: skip
PLAIN_SPECIAL = ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]


def byte_level(special: list[str], added: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        show_progress=False,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in added])
    return tokenizer


def metaspace(special: list[str], added: list[str]) -> Tokenizer:
    """Puts a space before the first word of a text, and falls back to bytes, like SentencePiece."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=300, show_progress=False, special_tokens=["<unk>", *special]
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    data = json.loads(tokenizer.to_str())
    vocab = data["model"]["vocab"]
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in added])
    return tokenizer


def loaded(folder: Path, tokenizer: Tokenizer, template: str, ends: dict[str, str]) -> Any:
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **ends)
    fast.save_pretrained(folder)
    return load(folder)


@pytest.fixture(scope="session")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Any:
    tokenizer = byte_level(CHATML_SPECIAL, CHATML_ADDED)
    folder = tmp_path_factory.mktemp("chatml")
    return loaded(folder, tokenizer, CHATML, {"eos_token": "<|im_end|>"})


@pytest.fixture(scope="session")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Has the marks of many families as tokens of their own, special or not."""
    tokenizer = byte_level([*CHATML_SPECIAL, *CALL_SPECIAL], [*CHATML_ADDED, *CALL_ADDED])
    folder = tmp_path_factory.mktemp("tagged")
    return loaded(folder, tokenizer, CHATML, {"eos_token": "<|im_end|>"})


@pytest.fixture(scope="session")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Any:
    tokenizer = metaspace(MISTRAL_SPECIAL, [])
    folder = tmp_path_factory.mktemp("mistral")
    return loaded(folder, tokenizer, MISTRAL, {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    tokenizer = byte_level(PLAIN_SPECIAL, ["\n\n", "<b>"])
    folder = tmp_path_factory.mktemp("plain")
    return loaded(folder, tokenizer, PLAIN, {"bos_token": "<bos>", "eos_token": "<eos>"})


@pytest.fixture(scope="session")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Any:
    tokenizer = byte_level(HARMONY_SPECIAL, [])
    folder = tmp_path_factory.mktemp("harmony")
    return loaded(folder, tokenizer, HARMONY, {"eos_token": "<|return|>"})


@pytest.fixture(scope="session")
def tokens_of() -> Callable[[Any, str], list[int]]:
    """Encoding from scratch, by the tokenizer itself."""

    def encode(tokenizer: Any, text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    return encode
