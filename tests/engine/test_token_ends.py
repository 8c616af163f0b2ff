"""Tokens that end an answer, by the files of a model and by its chat template."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxstack.core.errors import SetupError
from mlxstack.core.preset import KVSpec, ModelSpec
from mlxstack.demo import MODEL_DIR
from mlxstack.engine.loading import loader
from mlxstack.engine.loading.tokenizer_folder import load_tokenizer
from tests import models

pytestmark = pytest.mark.mlx
Change = Callable[..., Path]
CHAT = (
    "{% for m in messages %}<|open|>{{ m.role }}\n{{ m.content }}<|close|>{% endfor %}"
    "{% if add_generation_prompt %}<|open|>assistant\n{% endif %}"
)
THINKING = (
    "{% for m in messages %}<|open|>{{ m.role }}\n"
    "{% if m.reasoning_content %}{{ m.reasoning_content }}<|close|><|open|>final\n{% endif %}"
    "{{ m.content }}<|close|>{% endfor %}"
    "{% if add_generation_prompt %}<|open|>assistant\n{% endif %}"
)


@pytest.fixture
def change(tmp_path: Path) -> Change:
    """The demo's tokenizer with other files and added tokens."""

    def changed(template: str | None = None, added: tuple[str, ...] = (), **files: Any) -> Path:
        folder = tmp_path / "model"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(MODEL_DIR, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        for name, content in files.items():
            file = folder / f"{name}.json"
            known = json.loads(file.read_text()) if file.exists() else {}
            file.write_text(json.dumps({**known, **content}))
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        file = folder / "tokenizer.json"
        tokenizer = json.loads(file.read_text())
        first = models.VOCAB
        tokenizer["added_tokens"] += [
            {"id": first + i, "content": text, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False, "special": True}
            for i, text in enumerate(added)
        ]  # fmt: skip
        file.write_text(json.dumps(tokenizer))
        return folder

    return changed


def ends(folder: Path) -> set[int]:
    return set(load_tokenizer(folder).eos_token_ids)


@pytest.fixture
def own(change: Change) -> int:
    """The end that the demo's tokenizer names."""
    return int(load_tokenizer(change()).eos_token_id)


@pytest.mark.parametrize(
    "value, found",
    [
        (5, {5}), ([5, 6], {5, 6}), ([5, None], {5}), ([None, 5, 6.0, 7.5], {5, 6}),
        (["<|im_start|>", {"a": 1}, True, -1, 2**40, [5]], {1}), ("<|im_start|>", {1}),
        ([-1, 10**9], set()), ({"a": 1}, set()), ("nothing", set()), (None, set()),
        (list(range(5, 5000)), set(range(5, models.VOCAB))), ("5", {5}), (["5", "6"], {5, 6}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("file", ["config", "generation_config"])
def test_usable_ends_are_kept_and_others_named(
    change: Change,
    own: int,
    caplog: pytest.LogCaptureFixture,
    file: str,
    value: Any,
    found: set[int],
) -> None:
    start = load_tokenizer(change()).get_vocab()["<|im_start|>"]
    found = {start if token == 1 else token for token in found}
    others = {"config": "generation_config", "generation_config": "config"}
    files = {file: {"eos_token_id": value}, others[file]: {"eos_token_id": None}}
    caplog.clear()
    known = ends(change(**files))
    assert found | {own} <= known
    assert known - found - {own} <= ends(
        change(config={"eos_token_id": None}, generation_config={"eos_token_id": None})
    )
    values = value if isinstance(value, list) else [value]
    is_odd = value is not None and len(found) < len(values)
    assert (f"{file}.json" in caplog.text) == is_odd
    assert len(caplog.text) < 1000


def test_generation_config_counts_before_config(change: Change) -> None:
    both = change(config={"eos_token_id": 7}, generation_config={"eos_token_id": 8})
    assert 8 in ends(both) and 7 not in ends(both)
    odd = change(config={"eos_token_id": 7}, generation_config={"eos_token_id": [None]})
    assert 7 in ends(odd)


def test_a_token_that_closes_turns_in_the_template_is_an_end(change: Change, own: int) -> None:
    folder = change(CHAT, ("<|open|>", "<|close|>"))
    assert models.VOCAB + 1 in ends(folder)
    assert models.VOCAB not in ends(folder)
    named = change(CHAT.replace("<|close|>", "<|im_end|><|close|>"), ("<|open|>", "<|close|>"))
    assert models.VOCAB + 1 not in ends(named)


def test_a_token_that_opens_the_next_turn_is_an_end(change: Change) -> None:
    folder = change(CHAT.replace("<|close|>", ""), ("<|open|>", "<|close|>"))
    assert models.VOCAB in ends(folder)


def test_a_token_that_also_closes_thoughts_is_none(change: Change) -> None:
    assert models.VOCAB + 1 not in ends(change(THINKING, ("<|open|>", "<|close|>")))


@pytest.mark.parametrize("is_special", [True, False])
def test_known_ends_are_ends_without_a_template(change: Change, is_special: bool) -> None:
    folder = change("{{ messages[0].content }}", ("<|eot_id|>", "<|other|>"))
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    for token in tokenizer["added_tokens"][-2:]:
        token["special"] = is_special
    file.write_text(json.dumps(tokenizer))
    assert models.VOCAB in ends(folder)
    assert models.VOCAB + 1 not in ends(folder)


def loaded(folder: Path, n_rows: int) -> loader.LoadedModel:
    """The folder with a random llama of so many rows."""
    models.write(folder / "of", models.LLAMA | {"vocab_size": n_rows})
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / "of" / name, folder / name)
    return loader.load(ModelSpec(str(folder)), KVSpec())


def test_an_added_token_without_a_row_is_no_end(
    change: Change, caplog: pytest.LogCaptureFixture
) -> None:
    folder = change(added=("<|eot_id|>",))
    found = loaded(folder, models.VOCAB)
    assert found.facts.n_vocab == models.VOCAB
    assert models.VOCAB not in found.facts.eos
    assert "'<|eot_id|>' (1024)" in caplog.text
    assert models.VOCAB in loaded(folder, models.VOCAB + 1).facts.eos


def test_a_template_that_writes_a_token_without_a_row_is_refused(change: Change) -> None:
    folder = change(CHAT, ("<|open|>", "<|close|>"))
    with pytest.raises(SetupError, match=r"the chat template writes '<\|open\|>' \(1024\)"):
        loaded(folder, models.VOCAB)
    loaded(folder, models.VOCAB + 2)


def test_a_vocabulary_beyond_the_rows_is_refused(change: Change) -> None:
    with pytest.raises(SetupError, match=r"824 tokens .* no row .* \(200\).* do not belong"):
        loaded(change(), 200)
