"""Tiny models of mlx-vlm on disk, served over HTTP: cold, after a hit, after a restart."""

import json
import shutil
from pathlib import Path

import httpx
import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from msgspec import Struct

from mlxstack.core.preset import Preset, SamplingSpec
from mlxstack.demo import MODEL_DIR
from mlxstack.engine.model.mlx_vlm_models import built_whole
from tests.api.running import running, tiny_preset
from tests.matrix.builder import build
from tests.matrix.checks import Wrong
from tests.matrix.more_configs import config_of
from tests.patience import PATIENCE_S

Messages = list[dict[str, str]]

VOCAB = 1024
"""Tokens of the demo's tokenizer."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
QUESTION = " ".join(f"line {n} of a rather long story about a ship and its crew," for n in range(9))
MORE = "What did the crew find on the island of line 7?"
N_ANSWERED = 12


def write(folder: Path, name: str) -> Path:
    """Write a tiny model of this type, without its towers, with the demo's tokenizer."""
    folder.mkdir(parents=True)
    whole, _ = built_whole(name, config_of(name, VOCAB))
    # An index leaves out towers; what is no module of its own must be there.
    parts = whole.parameters()
    loose = {key: parts[key] for key, part in whole.items() if not isinstance(part, nn.Module)}
    weights = dict(tree_flatten({**loose, **build(name, n_vocab=VOCAB).parameters()}))
    file = "model-00001-of-00001.safetensors"
    mx.save_safetensors(str(folder / file), weights, metadata={"format": "mlx"})
    index = {"weight_map": dict.fromkeys(weights, file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config_of(name, VOCAB)))
    for part in TOKENIZER:
        shutil.copy(MODEL_DIR / part, folder)
    return folder


def check_http(name: str, work: Path) -> str:
    """A second turn gets the same answer cold, after the first one, and from disk."""
    preset = tiny_preset(
        write(work / "model", name), sampling=SamplingSpec(temperature=0, thinking=False)
    )
    first = [{"role": "user", "content": QUESTION}]
    both = [*first, {"role": "assistant", "content": "yes"}, {"role": "user", "content": MORE}]
    _, hit = asked(preset, work / "home", first, both)
    (restored,) = asked(preset, work / "home", both)
    (cold,) = asked(preset, work / "cold", both)
    for kind, answer in (("a hit", hit), ("a restart", restored)):
        if answer.text != cold.text:
            raise Wrong(f"after {kind} it answers otherwise than cold")
    if not min(hit.n_cached, restored.n_cached):
        return f"yes, but {hit.n_cached} tokens were reused, {restored.n_cached} after a restart"
    return "yes"


class Answer(Struct, frozen=True):
    """A message as JSON, and the tokens of its prompt that were reused."""

    text: str
    n_cached: int


def asked(preset: Preset, home: Path, *conversations: Messages) -> list[Answer]:
    """Answers of a service that ends afterwards."""
    try:
        with running(preset, home) as live, httpx.Client(timeout=PATIENCE_S) as http:
            return [_ask(http, live.url, messages) for messages in conversations]
    except (OSError, httpx.ConnectError) as error:
        raise Wrong("the service did not load its folder") from error


def _ask(http: httpx.Client, url: str, messages: Messages) -> Answer:
    body = {"model": "tiny", "max_tokens": N_ANSWERED, "messages": messages}
    response = http.post(f"{url}/v1/chat/completions", json=body)
    if response.status_code != 200:
        raise Wrong(f"HTTP {response.status_code}: {response.text[:200]}")
    answer = response.json()
    usage = answer["usage"]
    if not 0 < usage["completion_tokens"] <= N_ANSWERED:
        raise Wrong(f"{usage['completion_tokens']} tokens answered")
    text = json.dumps(answer["choices"][0]["message"])
    return Answer(text, usage["prompt_tokens_details"]["cached_tokens"])
