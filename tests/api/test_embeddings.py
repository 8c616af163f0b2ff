"""Embeddings: a service of its own, through OpenAI's SDK and llama-server's door."""

import asyncio
import json
from array import array
from collections.abc import Iterator
from concurrent.futures import Future
from math import sqrt
from pathlib import Path

import httpx
import mlx.core as mx
import ollama
import openai
import pytest
from mlx_lm import load

from mlxstack.core.preset import ModelSpec, Preset, ServerSpec, ServiceKind, SlotSpec
from mlxstack.demo import MODEL_DIR
from mlxstack.engine import embedding_engine
from mlxstack.engine.embedding_engine import MAX_TOKENS, Embedder, batches
from mlxstack.engine.embedding_pooling import Pooler
from mlxstack.engine.loading.tokenizer_folder import load_tokenizer
from mlxstack.models.embedding_recipe import EmbeddingRecipe, PoolingMode
from mlxstack.service.calls.embedding import numbers, shortened
from tests import models
from tests.api.running import Running, running, tiny_preset
from tests.api.test_swap import until
from tests.patience import PATIENCE_S
from tests.tolerance import ROUNDING, distance

pytestmark = [pytest.mark.mlx, pytest.mark.net]

TEXTS = ["The cat sleeps.", "read_file(path)", "a", "word " * 300]


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    preset = Preset(
        model=ModelSpec(id="demo", alias="demo-embedding"),
        kind=ServiceKind.EMBEDDING,
        slots=SlotSpec(count=1, n_ctx=1024),
        server=ServerSpec(port=0),
    )
    with running(preset, tmp_path_factory.mktemp("home")) as found:
        yield found


@pytest.fixture
def sdk(embedding: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{embedding.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def cosine(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def test_b16_vectors_are_of_one_length_and_the_same_for_the_same_text(sdk: openai.OpenAI) -> None:
    found = sdk.embeddings.create(model="demo-embedding", input=[*TEXTS, TEXTS[0]])
    vectors = [one.embedding for one in found.data]
    assert [one.index for one in found.data] == list(range(5))
    assert {len(vector) for vector in vectors} == {160}
    for vector in vectors:
        assert cosine(vector, vector) == pytest.approx(1, abs=1e-5)
    assert cosine(vectors[0], vectors[4]) == pytest.approx(1, abs=1e-5)
    assert cosine(vectors[0], vectors[1]) < 0.99
    assert found.usage.prompt_tokens == found.usage.total_tokens > 300


def test_b16_base64_and_numbers_are_the_same_vector(sdk: openai.OpenAI) -> None:
    one = sdk.embeddings.create(model="x", input="hello", encoding_format="float").data[0]
    other = sdk.embeddings.create(model="x", input="hello").data[0]
    assert one.embedding == pytest.approx(other.embedding, abs=1e-6)


def test_b16_a_text_and_its_tokens_are_the_same(embedding: Running, sdk: openai.OpenAI) -> None:
    tokens = httpx.post(embedding.url + "/tokenize", json={"content": "hello there"}).json()
    by_text = sdk.embeddings.create(model="x", input="hello there").data[0].embedding
    by_tokens = sdk.embeddings.create(model="x", input=tokens["tokens"]).data[0].embedding
    assert by_text == pytest.approx(by_tokens, abs=1e-6)


def test_each_prompt_form_of_llama_server_embeds_as_its_text(embedding: Running) -> None:
    tokens = httpx.post(embedding.url + "/tokenize", json={"content": "hello"}).json()["tokens"]
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    forms = ["hello", {"prompt_string": "hello"}, {"content": parts}, [*tokens, "hello"]]
    found = httpx.post(embedding.url + "/v1/embeddings", json={"input": forms}).raise_for_status()
    vectors = [one["embedding"] for one in found.json()["data"]]
    assert len(vectors) == 4
    assert vectors[1] == pytest.approx(vectors[0], abs=1e-6)
    assert vectors[2] == pytest.approx(vectors[0], abs=1e-6)


@pytest.mark.parametrize("form", [{}, {"content": "hello"}, {"content": [{"type": "image_url"}]}])
def test_an_object_without_text_is_not_embedded(embedding: Running, form: object) -> None:
    answer = httpx.post(embedding.url + "/v1/embeddings", json={"input": form})
    assert answer.status_code == 400


def test_ollamas_client_embeds(embedding: Running, sdk: openai.OpenAI) -> None:
    plain = sdk.embeddings.create(model="x", input="hello", dimensions=40).data[0].embedding
    with ollama.Client(embedding.url, timeout=PATIENCE_S) as client:
        found = client.embed("demo-embedding", ["hello", "there"], dimensions=40)
        long = client.embed("demo-embedding", "word " * 3000)
        with pytest.raises(ollama.ResponseError, match="holds 1024"):
            client.embed("demo-embedding", "word " * 3000, truncate=False)
        older = client.embeddings("demo-embedding", "hello").embedding
        assert client.show("demo-embedding").capabilities == ["embedding"]
    strict = ollama.EmbedResponse.model_validate_json(found.model_dump_json(), strict=True)
    assert strict.embeddings[0] == pytest.approx(plain, abs=1e-6)
    assert strict.total_duration and strict.model == "demo-embedding" and len(found.embeddings) == 2
    counted = sdk.embeddings.create(model="x", input=["hello", "there"]).usage.prompt_tokens
    assert found.prompt_eval_count == counted and long.prompt_eval_count == 1024
    assert numbers(shortened(array("f", older).tobytes(), 40)) == pytest.approx(plain, abs=1e-6)


def test_b16_dimensions_cut_and_keep_length_one(sdk: openai.OpenAI) -> None:
    whole = sdk.embeddings.create(model="x", input="hello").data[0].embedding
    cut = sdk.embeddings.create(model="x", input="hello", dimensions=40).data[0].embedding
    assert len(cut) == 40
    length = sqrt(sum(x * x for x in whole[:40]))
    assert cut == pytest.approx([x / length for x in whole[:40]], abs=1e-5)


def test_b16_llama_servers_shape(embedding: Running) -> None:
    found = httpx.post(embedding.url + "/embedding", json={"content": "hello"}).json()
    assert found[0]["index"] == 0
    assert len(found[0]["embedding"]) == 1
    assert len(found[0]["embedding"][0]) == 160


def test_b16_x9_many_texts_go_batch_by_batch_until_their_client_leaves(
    embedding: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = embedding.service.embedder
    sizes = list[int]()
    embed_batch = engine.embed
    max_tokens = 512
    long = {"input": ["word " * 40] * 400}

    def seen(texts: tuple[tuple[int, ...], ...]) -> Future[tuple[bytes, ...]]:
        sizes.append(sum(len(text) for text in texts))
        assert sizes[-1] <= max_tokens
        return embed_batch(texts)

    async def scene() -> None:
        async with httpx.AsyncClient(base_url=embedding.url, timeout=PATIENCE_S) as http:
            asking = asyncio.create_task(http.post("/v1/embeddings", json=long))
            await until(lambda: len(sizes) >= 2)
            assert (await http.post("/embedding", json={"content": "hello"})).status_code == 200
            assert not asking.done(), "a short request goes between"
            asking.cancel()
            await until(lambda: embedding.service.gate.n_inside == 0)
            sizes.clear()
            assert (await http.post("/embedding", json={"content": "hello"})).status_code == 200

    monkeypatch.setattr(embedding_engine, "MAX_TOKENS", max_tokens)
    monkeypatch.setattr(engine, "embed", seen)
    asyncio.run(scene())
    assert len(sizes) == 1, "nothing is done for who left"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"input": []}, "a list of texts"),
        ({"input": ""}, "empty"),
        ({"input": ["a", ""]}, "empty"),
        ({"input": [99999]}, "99999"),
        ({"input": "word " * 3000}, "1024"),
        ({"input": "a", "dimensions": 161}, "160"),
        ({"input": "a", "dimensions": 0}, "160"),
        ({"input": {"a": 1}}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ],
)
def test_b16_bad_input_is_refused_in_openais_words(
    embedding: Running, body: dict[str, object], says: str
) -> None:
    answer = httpx.post(embedding.url + "/v1/embeddings", json=body)
    assert answer.status_code == 400
    assert says in answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_b16_an_embedding_model_does_not_chat_and_a_chat_model_does_not_embed(
    embedding: Running, http: httpx.Client
) -> None:
    said = {"messages": [{"role": "user", "content": "hi"}]}
    answer = httpx.post(embedding.url + "/v1/chat/completions", json=said)
    assert answer.status_code == 501
    assert "embedding model" in answer.json()["error"]["message"]
    other = http.post("/v1/embeddings", json={"input": "hi"})
    assert other.status_code == 501
    assert "demo-embedding" in other.json()["error"]["message"]


def test_b16_the_service_is_well_and_tells_of_itself(embedding: Running) -> None:
    assert httpx.get(embedding.url + "/health").json() == {"status": "ok"}
    assert httpx.get(embedding.url + "/slots").json() == []
    assert httpx.get(embedding.url + "/props").json()["model_alias"] == "demo-embedding"
    assert httpx.get(embedding.url + "/metrics").status_code == 200
    assert httpx.post(embedding.url + "/slots/0?action=erase").status_code == 501


@pytest.mark.parametrize("mode", PoolingMode)
def test_b16_together_equals_alone(mode: PoolingMode) -> None:
    model = load(str(MODEL_DIR))[0]
    model.set_dtype(mx.float32)
    embed = Embedder(model, Pooler(EmbeddingRecipe((mode,)), 160)).embed
    texts = tuple(tuple(range(9, 9 + n)) for n in (3, 200, 1, 40, 40))
    together = embed(texts)
    for text, vector in zip(texts, together, strict=True):
        assert distance(numbers(embed((text,))[0]), numbers(vector)) <= ROUNDING


def test_b16_batches_hold_every_text_once_and_are_bounded() -> None:
    lengths = [1, 5000, 3, 4096, 2048, 2048, 7]
    made = batches(lengths)
    assert sorted(at for batch in made for at in batch) == list(range(7))
    for batch in made:
        assert len(batch) == 1 or len(batch) * max(lengths[at] for at in batch) <= MAX_TOKENS


def test_a_text_ends_as_its_model_was_trained_and_is_no_longer(tmp_path: Path) -> None:
    folder = models.write(tmp_path / "model", models.LLAMA)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "add_eos_token": True}))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 8}')
    tokenizer = load_tokenizer(folder)
    tokens = tokenizer.encode("read a file", add_special_tokens=False)
    preset = tiny_preset(folder, kind=ServiceKind.EMBEDDING, slots=SlotSpec(count=1, n_ctx=1024))
    with running(preset, tmp_path / "home") as found:

        def embedded(path: str, **body: object) -> httpx.Response:
            return httpx.post(f"{found.url}{path}", json=body, timeout=PATIENCE_S)

        ended = embedded("/v1/embeddings", input=[[*tokens, tokenizer.eos_token_id]]).json()
        plain = embedded("/v1/embeddings", input="read a file").json()
        assert plain["data"][0]["embedding"] == ended["data"][0]["embedding"]
        assert plain["usage"]["prompt_tokens"] == len(tokens) + 1
        assert embedded("/v1/embeddings", input="a b c " * 9).status_code == 400
        assert embedded("/api/embed", model="tiny", input="a b c " * 9).is_success


def test_b16_a_cut_of_nothing_is_no_division_by_zero() -> None:
    assert numbers(shortened(bytes(16), 2)) == [0.0, 0.0]
