"""Published chat templates, read from a folder that is not part of the project.

MLX_STACK_FORMATS names a folder with `models/templates/*.jinja`.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from mlxstack.core.conversation import Conversation
from mlxstack.text.assembly import assemble_text, template_report
from mlxstack.text.template.capabilities import losses
from tests.environment import option
from tests.text.conftest import byte_level, loaded
from tests.text.test_template_losses import ACT, CONVERSATIONS, words_of

FOLDER = option("FORMATS")
TEMPLATES = sorted(Path(FOLDER, "models", "templates").glob("*.jinja")) if FOLDER else []
EACH = [pytest.param(path, marks=pytest.mark.slow) for path in TEMPLATES]
"""As parameters of a test, which takes seconds over all of them."""
MARK = re.compile(r"<[|｜][^\s<>{}']{1,40}[|｜]>|</?[a-z_]{2,20}(?::[a-z_]+)?>|\[/?[A-Z_]{3,30}\]")
ENDS = re.compile(
    r"<\|im_end\|>|<\|eot(?:_id)?\|>|<\|return\|>|<turn\|>|\[e~\[|<\|end\|>|</assistant>"
    r"|<[|｜][^<>]*(?:end▁of▁sentence|hy_eos|END_OF_TURN)[^<>]*[|｜]>|<\|(?:user|observation)\|>|<sep>"
    r"|<seed:eos>"
)


KEPT_BY = {
    "GLM-4.7-Flash": {"clear_thinking": False},
    "LFM2.5-8B-A1B": {"preserve_thinking": True},
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": {"truncate_history_thinking": False},
}
"""The templates of the folder that have a switch for earlier thoughts; others keep or drop them."""


def tokenizer_of(template: Path, folder: Path) -> Any:
    """A small tokenizer with the marks of a template as tokens."""
    source = template.read_text()
    ends = list(dict.fromkeys(ENDS.findall(source))) or ["</s>"]
    special = list(dict.fromkeys(["<s>", *ends, *MARK.findall(source)]))
    texts = {"bos_token": "<s>", "eos_token": ends[0]}
    return loaded(folder, byte_level(special, []), source, texts)


@pytest.mark.skipif(not FOLDER, reason="MLX_STACK_FORMATS names no folder with chat templates")
def test_there_are_templates_to_read() -> None:
    assert TEMPLATES


@pytest.mark.parametrize("template", EACH, ids=lambda path: path.stem)
def test_a_published_template_refuses_and_loses_nothing(template: Path, tmp_path: Path) -> None:
    prompt_maker = assemble_text(tokenizer_of(template, tmp_path)).prompt_maker
    for messages in CONVERSATIONS.values():
        for effort in ({}, {"reasoning_effort": "medium"}, {"reasoning_effort": "xhigh"}):
            text = prompt_maker.text(Conversation(messages, tools=(ACT,), template=effort))
            assert [word for word in (*words_of(messages), "word-tool") if word not in text] == []
    assert losses(prompt_maker.template.probe, prompt_maker.template.capabilities) == []


@pytest.mark.parametrize("template", EACH, ids=lambda path: path.stem)
def test_a_published_template_reuses_a_tool_loop(template: Path, tmp_path: Path) -> None:
    found = template_report(tokenizer_of(template, tmp_path))
    assert (found.reuse["tool loop"] or 0) >= 0.99
    assert found.keeps_thoughts_by == KEPT_BY.get(template.stem, {})
    if found.keeps_thoughts_by:
        assert (found.reuse["new user message"] or 0) >= 0.99
