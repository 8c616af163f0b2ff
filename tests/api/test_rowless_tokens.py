"""A token without a row in the embedding reaches the model by no request."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxstack.core.preset import ModelSpec, ServiceKind, Speculation
from tests import models
from tests.api.running import Running, running, tiny_preset

pytestmark = [pytest.mark.mlx, pytest.mark.net]
TEXT = "<|extra|>"
TOKEN = models.VOCAB
NAMED = f"the token '{TEXT}' ({TOKEN}) has no row"


def with_token(folder: Path) -> Path:
    """A tiny model whose tokenizer has one token more than its embedding has rows."""
    models.write(folder, models.LLAMA | {"vocab_size": models.VOCAB})
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["added_tokens"].append(
        {"id": TOKEN, "content": TEXT, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
    )  # fmt: skip
    file.write_text(json.dumps(tokenizer))
    template = (folder / "chat_template.jinja").read_text()
    # Written where a client asks for it, so that the model starts.
    (folder / "chat_template.jinja").write_text(f"{{% if extra %}}{TEXT}{{% endif %}}{template}")
    return folder


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("home")
    preset = tiny_preset(with_token(home / "tiny"), speculation=Speculation.AUTO)
    with running(preset, home) as found:
        yield found


def ask(service: Running, path: str, **body: Any) -> tuple[int, str]:
    answer = httpx.post(service.url + path, json={"max_tokens": 4, "n_predict": 4, **body})
    return answer.status_code, answer.text.replace("\\u003c", "<").replace("\\u003e", ">")


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {"prompt": f"a {TEXT}"}),
        ("/completion", {"prompt": [5, TOKEN]}),
        ("/completion", {"prompt": [5, TEXT]}),
        ("/v1/completions", {"prompt": f"{TEXT} b"}),
        ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"extra": True}}),
        ("/v1/agents/a/generate", {**CHAT, "chat_template_kwargs": {"extra": True}}),
    ],
)
def test_a_prompt_with_it_is_refused_by_its_name(
    service: Running, path: str, body: dict[str, Any]
) -> None:
    status, text = ask(service, path, **body)
    assert status == 400 and NAMED in text, text
    assert ask(service, "/v1/chat/completions", **CHAT)[0] == 200


def test_a_bias_for_it_is_refused(service: Running) -> None:
    status, text = ask(service, "/completion", prompt="Hi", logit_bias=[[TOKEN, 5]])
    assert status == 400 and str(TOKEN) in text


def test_a_grammar_cannot_ask_for_it(service: Running) -> None:
    for rule in (f"<[{TOKEN}]>", TEXT):
        grammar = f"%llguidance {{}}\nstart: {rule}"
        status, _ = ask(service, "/v1/chat/completions", **CHAT, grammar=grammar)
        assert status == 400


def test_the_text_of_a_user_is_no_token(service: Running) -> None:
    message = {"messages": [{"role": "user", "content": f"What is {TEXT}?"}]}
    assert ask(service, "/v1/chat/completions", **message)[0] == 200
    prediction = {"type": "content", "content": TEXT}
    assert ask(service, "/v1/chat/completions", **CHAT, prediction=prediction)[0] == 200
    assert ask(service, "/tokenize", content=TEXT)[0] == 200


def test_an_embedder_refuses_it(service: Running, tmp_path: Path) -> None:
    folder = shutil.copytree(Path(service.service.preset.model.id), tmp_path / "model")
    preset = tiny_preset(folder, model=ModelSpec(id=str(folder)), kind=ServiceKind.EMBEDDING)
    with running(preset, tmp_path / "home") as found:
        status, text = ask(found, "/v1/embeddings", input=[[5, TOKEN]])
        assert status == 400 and NAMED in text
        assert ask(found, "/v1/embeddings", input="Hello")[0] == 200
