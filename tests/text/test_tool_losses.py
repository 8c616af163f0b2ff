"""Losses of chat templates: whole ones lose nothing, and each damage is told by its name."""

from pathlib import Path
from typing import Any

import pytest

from mlxstack.engine.loading.tokenizer_folder import load_tokenizer
from mlxstack.text.assembly import template_tool_losses
from mlxstack.text.template.tool_losses import LostPart
from tests.text.conftest import CHATML, MISTRAL, byte_level, loaded
from tests.text.damaged_templates import DAMAGES, Damage, losses

MARKS = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("chatml")
    return loaded(folder, byte_level(MARKS, []), CHATML, {"eos_token": "<|im_end|>"})


def test_a_whole_template_loses_nothing(tokenizer: Any) -> None:
    assert template_tool_losses(tokenizer) == ((), ())


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.lost.name)
def test_a_damage_is_told(tokenizer: Any, damage: Damage) -> None:
    assert damage.lost in losses(tokenizer, damage.of(CHATML))


def test_a_damaged_template_of_a_folder_is_told_too(tmp_path: Path) -> None:
    """The template gives some of the end tokens, too."""
    for damage in DAMAGES:
        folder = tmp_path / damage.lost.name
        eos = {"eos_token": "<|im_end|>"}
        loaded(folder, byte_level(MARKS, []), damage.of(CHATML), eos)
        assert damage.lost in template_tool_losses(load_tokenizer(folder))[0]


def test_what_a_template_cannot_write_is_in_the_prompt_all_the_same(tmp_path: Path) -> None:
    special = ["[INST]", "[/INST]", "[TOOL_CALLS]", "</s>", "<s>"]
    texts = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = loaded(tmp_path, byte_level(special, []), MISTRAL, texts)
    by_template, in_prompt = template_tool_losses(tokenizer)
    assert by_template
    assert in_prompt == ()


def test_a_template_that_takes_no_tools_at_all_loses_them(tokenizer: Any) -> None:
    bare = "{%- for m in messages %}{{- m.role + ': ' + m.content + '<|im_end|>' }}{%- endfor %}"
    assert {LostPart.TOOLS, LostPart.CALLS} <= set(losses(tokenizer, bare))
