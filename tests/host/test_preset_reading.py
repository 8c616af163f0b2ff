"""A2: presets are read strictly, and a refusal names file, key, line and what would be right."""

import json
import re
from pathlib import Path

import pytest

from mlxstack.config import presets
from mlxstack.config.overrides import (
    document_of,
    from_environment,
    from_option,
    unread_variables,
    variables,
)
from mlxstack.config.preset_reflection import leaves
from mlxstack.config.presets import BUILTIN_MODEL
from mlxstack.core.errors import SetupError
from mlxstack.core.preset import Anticipation, ServiceKind, Speculation
from mlxstack.host.home import Home

SOURCES = ("Shape: ", "Sampling: ", "Switches of its template: ", "real weights")
"""Texts in the comment at the top of a shipped preset."""


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def written(tmp_path: Path, text: str, name: str = "mine.yaml") -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


REFUSALS = [
    ("model: {id: demo}\nslots:\n  coutn: 1\n", 3, ["unknown key `slots.coutn`", "`count`"]),
    (
        "model:\n  id: demo\n  draft: x/y\nspeculation: off\n",
        3,
        ["model.draft is x/y", "set speculation: auto"],
    ),
    (
        "model:\n  id: demo\n  draft: x/y\nkind: embedding\n",
        3,
        ["model.draft is x/y", "embeddings need no drafts"],
    ),
    (
        "model:\n  id: demo\n  mtp: x/y\nspeculation: off\n",
        3,
        ["model.mtp is x/y", "set speculation: auto"],
    ),
    (
        "model:\n  id: demo\n  draft: x/y\n  mtp: a/b\nspeculation: auto\n",
        4,
        ["model.mtp does not go with `model.draft`"],
    ),
    ("model: {id: demo}\nslot: {}\n", 2, ["unknown key `slot`", "did you mean `slots`"]),
    ("model: {id: demo}\nslots:\n  count: 0\n", 3, ["slots.count is `0`", "from 1 to 256"]),
    ("model: {id: demo}\nslots:\n  count: '3'\n", 3, ["slots.count is `'3'`", "whole number"]),
    ("model: {id: demo}\nslots: 3\n", 2, ["slots is `3`", "a section with count"]),
    ("model: {id: demo}\nslots:\n", 2, ["slots is empty", "a section"]),
    ("model: {id: demo}\nkind: chta\n", 2, ["one of chat, embedding"]),
    ("model: {id: demo}\nkv:\n  bits: 5\n", 3, ["kv.bits is `5`", "`4` or `8` or `16`"]),
    (
        "model: {id: demo}\nkv:\n  group_size: 48\n",
        3,
        ["kv.group_size is `48`", "`32` or `64` or `128`"],
    ),
    ("model: {id: demo}\nbatch:\n  max_size: 0\n", 3, ["batch.max_size is `0`", "at least 1"]),
    ("model: {id: demo}\nsampling:\n  max_tokens: 0\n", 3, ["sampling.max_tokens is 0", "-1"]),
    ("model: {id: demo}\nsampling:\n  max_tokens: -2\n", 3, ["sampling.max_tokens is `-2`"]),
    ("model: {id: demo}\nsampling:\n  top_p: 2\n", 3, ["sampling.top_p is `2`", "to 1 or null"]),
    ("model: {id: demo}\nprefix_cache:\n  block_size: 100\n", 3, ["a multiple of 16"]),
    ("model: {id: demo}\nserver:\n  port: 99999\n", 3, ["server.port", "from 0 to 65535"]),
    ("model: {id: demo}\nserver:\n  api_keys: [a, 3]\n", 3, ["server.api_keys[1]", "a text"]),
    (
        "model: {id: demo}\nserver:\n  api_keys: [{key: a, tier: urgent}]\n",
        3,
        ["server.api_keys[0].tier is `urgent`", "must be one of high, normal, low"],
    ),
    (
        "model: {id: demo}\nserver:\n  api_keys: [{tier: low}]\n",
        3,
        ["`server.api_keys[0].key` is missing; it must be a text"],
    ),
    ("model: {id: demo}\nserver:\n  api_keys: ['']\n", 3, ["server.api_keys[0] is empty"]),
    (
        "model: {id: demo}\nserver:\n  host: 0.0.0.0\n",
        3,
        ["server.host is 0.0.0.0", "mlx-stack key", "server.allow_unauthenticated"],
    ),
    ("model: {id: demo}\nmodel: {id: x}\n", 2, ["`model` is given twice", "line 1"]),
    ("model: {id: demo}\nslots:\n  count: [a\n", 4, ["this is not YAML"]),
    ("model: {id: demo}\n---\na: 1\n", 2, ["this is not YAML"]),
    ("model: {id: demo}\non: 1\n", 2, ["must be a plain text"]),
    ("model: {id: demo}\nname: ../evil\n", 2, ["name is `../evil`", "letters"]),
    ("extends: dmo\n", 1, ["no preset is called `dmo`", "did you mean `demo`"]),
    ("extends: [demo]\n", 1, ["extends must be the name"]),
    ("extends: mine.yaml\n", 1, ["in a circle: mine -> mine"]),
    (
        "model: {id: demo}\nprefix_cache:\n  warm_prefixes:\n    - name: a\n",
        4,
        ["warm_prefixes[0]", "none of them", "exactly one"],
    ),
    (
        "model: {id: demo}\nprefix_cache:\n  warm_prefixes:\n"
        "    - {name: a, text_file: x}\n    - {name: a, text_file: y}\n",
        5,
        ["warm_prefixes[1].name", "a second time"],
    ),
    (
        "model: {id: demo}\nprefix_cache:\n  warm_prefixes: [{name: a/b, text_file: x}]\n",
        3,
        ["warm_prefixes[0].name is `a/b`", "without `/`"],
    ),
    (
        "model: {id: demo}\nprefix_cache:\n  warm_prefixes: [{name: .., text_file: x}]\n",
        3,
        ["warm_prefixes[0].name is `..`"],
    ),
    ("model: {id: demo}\nserver: {drain_s: .inf}\n", 2, ["server.drain_s is `.inf`", "finite"]),
    ("model: {id: demo}\nserver: {drain_s: 1.0e+300}\n", 2, ["server.drain_s", "to 86400"]),
    ("template: {a: [.nan]}\nmodel: {id: demo}\n", 1, ["template.a[0] is `.nan`", "finite"]),
    ("model: {id: demo}\nserver: {port: 07109}\n", 2, ["server.port is `07109`", "65535"]),
    ("model: {id: demo}\nserver: {port: 1:58:29}\n", 2, ["server.port is `'1:58:29'`"]),
    ("model: {id: demo}\ntemplate: {a: !!set {b}}\n", 2, ["template.a", "`set`", "without a tag"]),
    ("model: {id: demo}\n[a]: 1\n", 2, ["the key `?` must be a plain text"]),
    ("model: {id: demo}\nkv:\n  <<: {bits: 8}\n", 3, ["unknown key `kv.<<`"]),
    ('model: {id: demo}\nserver: {api_keys: ["a\\nb"]}\n', 2, ["api_keys[0]", "printable ASCII"]),
    ("model: {id: demo}\nserver: {api_keys: [schlüssel]}\n", 2, ["api_keys[0]", "ASCII"]),
]


@pytest.mark.parametrize(("text", "line", "expected"), REFUSALS)
def test_a2_refusals_name_file_line_key_and_remedy(
    tmp_path: Path, home: Home, text: str, line: int, expected: list[str]
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(SetupError) as caught:
        presets.load(path, home)
    message = caught.value.message
    assert message.startswith(f"{path}:{line}: ")
    for word in expected:
        assert word in message


@pytest.mark.parametrize(
    "server",
    [
        "host: 127.0.0.9",
        "host: '::1'",
        "host: localhost",
        "{host: 0.0.0.0, api_keys: [a]}",
        "{host: 192.168.1.7, allow_unauthenticated: true}",
    ],
)
def test_a_host_that_is_safe_or_meant_is_taken(tmp_path: Path, home: Home, server: str) -> None:
    text = f"model: {{id: demo}}\nserver: {{{server.strip('{}')}}}\n"
    assert presets.load(written(tmp_path, text), home).preset.server.host


def test_a2_a_missing_model_says_what_is_missing(tmp_path: Path, home: Home) -> None:
    path = written(tmp_path, "slots: {count: 1}\n")
    with pytest.raises(SetupError, match=r"mine\.yaml: `model` is missing; it must be a section"):
        presets.load(path, home)


@pytest.mark.parametrize("text", ["- a\n", "", "just words\n"])
def test_a2_a_preset_is_a_mapping(tmp_path: Path, home: Home, text: str) -> None:
    with pytest.raises(SetupError, match="a preset is a mapping"):
        presets.load(written(tmp_path, text), home)


def test_every_builtin_preset_is_sound_and_says_when_to_use_it(home: Home) -> None:
    found = presets.listed(home)
    assert {"demo", "gemma4-26b-a4b", "gpt-oss-20b", "qwen3.6-35b-a3b"} <= set(found)
    for name in found:
        preset = presets.load(name, home).preset
        assert preset.name == name
        assert preset.description


def test_every_shipped_model_names_the_sources_of_its_shape_and_sampling(home: Home) -> None:
    for name, file in presets.listed(home).items():
        preset = presets.load(name, home).preset
        if preset.model.id == BUILTIN_MODEL or preset.kind is ServiceKind.EMBEDDING:
            continue
        config = json.loads((file.parent / "configs" / f"{name}.json").read_text())
        assert config["excerpt_of"] == preset.model.id
        assert "https://" in config["source"]
        head = "\n".join(line for line in file.read_text().splitlines() if line.startswith("#"))
        for text in SOURCES:
            assert text in head, f"the comment at the top of presets/{name}.yaml lacks `{text}`"
        for switch in preset.template:
            assert f"`{switch}`" in head
        assert ("`sampling.thinking`" in head) == (preset.sampling.thinking is False)
        assert preset.sampling.temperature


def test_a_preset_tells_the_cost_of_earlier_reasoning(home: Home) -> None:
    """1,000 tokens of it, in the slot and in KV; or that no switch keeps it."""
    told = set()
    for name, file in presets.listed(home).items():
        preset = presets.load(name, home).preset
        text = file.read_text()
        line = next((x for x in text.splitlines() if x.startswith("# Earlier reasoning: ")), "")
        if not preset.template:
            told.add("dropped" in line)
            continue
        (switch,) = preset.template
        per_token = re.search(r"(\d+) KiB a token", text)
        assert per_token is not None
        assert f"kept by `{switch}`" in line
        assert f"{round(int(per_token[1]) * 1000 / 1024)} MiB" in line
        assert f"{100_000 / preset.slots.n_ctx:.1f} % of a slot" in line
    assert told == {False, True}


def test_a3_presets_for_agents_have_contexts_of_64k_and_more(home: Home) -> None:
    for name in ("qwen3.6-35b-a3b", "gemma4-26b-a4b", "gpt-oss-120b", "qwen3-coder-next"):
        slots = presets.load(name, home).preset.slots
        assert slots.count >= 3 and slots.n_ctx >= 65536


def test_short_forms_are_understood(tmp_path: Path, home: Home) -> None:
    path = written(tmp_path, "model: org/some-model\nslots: {n_ctx: 64k}\n")
    loaded = presets.load(path, home, [from_option("prefill.chunk_size=1k")])
    assert loaded.preset.model.id == "org/some-model"
    assert loaded.preset.slots.n_ctx == 65536
    assert loaded.preset.prefill.chunk_size == 1024
    chosen = presets.load(path, home, [from_option("model=org/other")])
    assert chosen.preset.model.id == "org/other"
    wrong = written(tmp_path, "model: org/some-model\nslots: {n_ctx: many}\n")
    with pytest.raises(SetupError, match=r"slots\.n_ctx is `many`, but must be a whole number"):
        presets.load(wrong, home)


def test_a_users_own_preset_goes_before_the_builtin_one(home: Home) -> None:
    home.presets.mkdir(parents=True)
    (home.presets / "demo.yaml").write_text("model: {id: demo}\nslots: {count: 9}\n")
    assert presets.load("demo", home).preset.slots.count == 9


def test_an_unknown_name_gets_the_nearest(home: Home) -> None:
    with pytest.raises(SetupError, match="did you mean `demo`"):
        presets.load("dmeo", home)


def test_a12_command_line_over_environment_over_file_over_extends(
    tmp_path: Path, home: Home
) -> None:
    path = written(
        tmp_path,
        "extends: demo\nslots: {count: 5, n_ctx: 1024}\nbatch: {max_size: 2}\n"
        "prefill: {chunk_size: 64}\n",
    )
    env = {"MLX_STACK_BATCH_MAX_SIZE": "6", "MLX_STACK_SLOTS_N_CTX": "2048", "HOME": "/x"}
    over = [*from_environment(env), from_option("slots.n_ctx=4032")]
    loaded = presets.load(path, home, over, tmp_path)
    preset = loaded.preset
    assert preset.slots.n_ctx == 4032
    assert preset.batch.max_size == 6
    assert preset.slots.count == 5
    assert preset.sampling.thinking is False
    assert preset.model.id == "demo"
    assert preset.name == "mine"
    assert loaded.origins["slots.n_ctx"] == "--set slots.n_ctx"
    assert loaded.origins["batch.max_size"] == "MLX_STACK_BATCH_MAX_SIZE"
    assert loaded.origins["slots.count"] == f"{path}:2"
    assert loaded.origins["model.id"].endswith("demo.yaml:5")


def test_amounts_have_units_and_a_text_is_a_list_of_one(tmp_path: Path, home: Home) -> None:
    lines = (
        "prefix_cache: {disk: {max_bytes: 20GB, max_age_s: 30d}}",
        "server: {drain_s: 2m, max_body_bytes: 1.5 MiB, idle_unload_s: null}",
        "slots: {n_ctx: 32k}",
    )
    path = written(tmp_path, "\n".join(("model: demo", *lines)))
    env = {"MLX_STACK_SERVER_API_KEYS": "sesame"}
    over = [*from_environment(env), from_option("server.idle_unload_s=15m")]
    preset = presets.load(path, home, over).preset
    assert preset.prefix_cache.disk.max_bytes == 20 * 2**30
    assert preset.prefix_cache.disk.max_age_s == 30 * 86_400
    assert (preset.server.drain_s, preset.server.idle_unload_s) == (120, 900)
    assert preset.server.max_body_bytes == 3 * 2**19
    assert preset.slots.n_ctx == 32_768
    assert preset.server.api_keys == ("sesame",)
    with pytest.raises(SetupError, match=r"max_bytes is `much`, but .* or null, such as 20GB"):
        presets.load("demo", home, [from_option("prefix_cache.disk.max_bytes=much")])


def test_off_is_a_word_where_a_key_wants_one(tmp_path: Path, home: Home) -> None:
    lines = ("speculation: off", "prefix_cache: {anticipate: off}", "server: {prevent_sleep: off}")
    text = "\n".join(("model: demo", *lines))
    preset = presets.load(written(tmp_path, text), home).preset
    assert preset.speculation is Speculation.OFF
    assert preset.prefix_cache.anticipate is Anticipation.OFF
    assert preset.server.prevent_sleep is False
    with pytest.raises(SetupError, match=r"kv\.bits"):
        presets.load(written(tmp_path, "model: demo\nkv: {bits: off}\n"), home)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("slots.count=x", "slots.count is `x`, but must be a whole number"),
        ("slots.count=2024-13-45", "slots.count is `'2024-13-45'`, but must be a whole number"),
        ("slots.count=!!bool maybe", "slots.count is `"),
        pytest.param("server.api_keys=" + "[" * 2000, "must be a list", id="too deep"),
        ("slots.cont=1", "did you mean `slots.count`"),
        ("kv.swa_full=true", "sliding windows are always capped"),
        ("prefix_cache.live_sharing=auto", "every slot holds its own copy of a common prefix"),
        ("slots=1", "slots is a section; set one of its keys: count"),
        ("slots.count", "write it as key=value"),
        ("=3", "write it as key=value"),
        ("sampling.top_p=3", "sampling.top_p is `3`"),
    ],
)
def test_wrong_options_are_named(home: Home, text: str, expected: str) -> None:
    with pytest.raises(SetupError) as caught:
        presets.load("demo", home, [from_option(text)])
    assert caught.value.message.startswith("--set ")
    assert expected in caught.value.message


def test_options_hold_lists_texts_nulls_and_mappings(tmp_path: Path) -> None:
    texts = [
        "server.api_keys=[a, b]",
        "model.alias=123",
        "sampling.thinking=null",
        "template.tone=dry",
        "kv.bits=8",
        "batch.enabled=false",
    ]
    values = document_of(map(from_option, texts), tmp_path).values
    assert values == {
        "server": {"api_keys": ["a", "b"]},
        "model": {"alias": "123"},
        "sampling": {"thinking": None},
        "template": {"tone": "dry"},
        "kv": {"bits": 8},
        "batch": {"enabled": False},
    }


def test_a_misspelt_variable_of_a_section_is_refused() -> None:
    with pytest.raises(SetupError, match="did you mean `MLX_STACK_BATCH_MAX_SIZE`"):
        from_environment({"MLX_STACK_BATCH_MAXSIZE": "3"})
    assert from_environment({"MLX_STACK_HOME": "/x", "MLX_STACK_API_KEY": "k"}) == []


def test_a_variable_that_nothing_reads_is_named_with_the_right_one() -> None:
    env = {"MLX_STACK_PORT": "1", "MLX_STACK_N_CTX": "2", "MLX_STACK_MEMROY": "8GB"}
    quiet = {"MLX_STACK_HOME": "/x", "MLX_STACK_SERVER_PORT": "3", "MLX_STACK_SLOTS_CUONT": "1"}
    assert list(unread_variables(env | quiet).values()) == [
        "MLX_STACK_MEMROY is set, but nothing reads it; did you mean `MLX_STACK_MEMORY`?",
        "MLX_STACK_N_CTX is set, but nothing reads it; did you mean `MLX_STACK_SLOTS_N_CTX`?",
        "MLX_STACK_PORT is set, but nothing reads it; did you mean `MLX_STACK_SERVER_PORT`?",
    ]


def test_no_variable_of_the_package_is_warned_of() -> None:
    root = Path(presets.__file__).parent.parent
    texts = [file.read_text("utf-8") for file in root.rglob("*.py")]
    read = {name for text in texts for name in re.findall(r'"(MLX_STACK_[A-Z_]*[A-Z])"', text)}
    assert len(read) > 5 and unread_variables(dict.fromkeys(read, "")) == {}


def test_every_key_has_its_own_variable() -> None:
    assert len(variables()) == len(list(leaves()))


def test_paths_are_meant_from_the_file_or_from_the_current_folder(
    tmp_path: Path, home: Home
) -> None:
    deep = tmp_path / "deep"
    deep.mkdir()
    path = written(
        deep,
        "model: {id: ./weights, adapter: ../lora}\n"
        "prefix_cache: {warm_prefixes: [{name: a, text_file: a.txt}]}\n",
    )
    over = [from_option("slots.save_path=kept")]
    preset = presets.load(path, home, over, tmp_path).preset
    assert preset.model.id == str(deep / "weights")
    assert preset.model.adapter == str(tmp_path / "lora")
    assert preset.slots.save_path == str(tmp_path / "kept")
    assert preset.prefix_cache.warm_prefixes[0].text_file == str(deep / "a.txt")


def test_slot_files_live_under_the_home_unless_said_otherwise(home: Home) -> None:
    assert presets.load("demo", home).preset.slots.save_path == str(home.slots / "demo")


def test_extends_replaces_lists_and_merges_sections(tmp_path: Path, home: Home) -> None:
    written(tmp_path, "model: {id: demo}\nserver: {api_keys: [a, b], port: 1234}\n", "base.yaml")
    path = written(tmp_path, "extends: base.yaml\nserver:\n  api_keys: [c]\n")
    loaded = presets.load(path, home)
    assert loaded.preset.server.api_keys == ("c",)
    assert loaded.preset.server.port == 1234
    assert "server.api_keys[1]" not in loaded.origins


def test_values_mean_what_stands_there(tmp_path: Path, home: Home) -> None:
    path = written(
        tmp_path,
        "\ufeffmodel: {id: demo, alias: 007}\r\ndescription: 2026-01-01\r\n"
        "slots: &slots {n_ctx: 0x400, count: 1_0}\r\n"
        "prefill: {max_stall_ms: 1e3, chunk_size: 0x80}\r\n"
        "template: {today: 2026-01-01, same: *slots}\r\n",
    )
    preset = presets.load(path, home).preset
    assert (preset.model.alias, preset.description) == ("007", "2026-01-01")
    assert (preset.slots.n_ctx, preset.slots.count) == (1024, 10)
    assert preset.prefill.max_stall_ms == 1000.0
    assert preset.template == {"today": "2026-01-01", "same": {"n_ctx": 1024, "count": 10}}
    with pytest.raises(SetupError, match=r"server\.port is `07109`"):
        presets.load(path, home, [from_option("server.port=07109")])


def test_an_unreadable_file_is_named(tmp_path: Path, home: Home) -> None:
    path = tmp_path / "bin.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SetupError, match="cannot be read"):
        presets.load(str(path), home)
    with pytest.raises(SetupError, match="there is no preset file"):
        presets.load(str(tmp_path / "none.yaml"), home)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("demo", "demo"),
        ("mine.yaml", "/there/mine.yaml"),
        ("mine.yml", "/there/mine.yml"),
        ("./sub/mine", "/there/sub/mine"),
        ("org/model", "org/model"),
        ("/a/mine", "/a/mine"),
    ],
)
def test_a_path_means_the_folder_of_who_says_it(wanted: str, found: str) -> None:
    assert presets.from_anywhere(wanted, Path("/there")) == found


def test_a_draft_model_is_a_folder_beside_the_preset_a_hub_id_or_the_demo(
    tmp_path: Path, home: Home
) -> None:
    text = "model: {id: demo, draft: DRAFT}\nspeculation: auto\n"
    for draft, found in (("./small", str(tmp_path / "small")), ("a/b", "a/b"), ("demo", "demo")):
        path = written(tmp_path, text.replace("DRAFT", draft))
        assert presets.load(path, home).preset.model.draft == found
    over = from_environment({"MLX_STACK_MODEL_DRAFT": "c/d"})
    assert presets.load(path, home, over).preset.model.draft == "c/d"


def test_demo_comes_before_what_is_named_after_it(home: Home) -> None:
    found = list(presets.listed(home))
    assert found == sorted(found)


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        ("pace:\n  max_bite: 64\n", "pace.max_bite", "prefill.chunk_size"),
        ("pace:\n  max_stall_ms: 100\n", "pace.max_stall_ms", "prefill.max_stall_ms"),
        ("pace:\n  aging_per_s: 1\n", "pace.aging_per_s", "queue.aging_per_s"),
        ("kv:\n  quantize_from: 8\n", "kv.quantize_from", "kv.quantized_start"),
        ("server:\n  without_key: true\n", "server.without_key", "server.allow_unauthenticated"),
        ("when_to_use: Always.\n", "when_to_use", "description"),
    ],
)
def test_a_renamed_key_is_refused_with_its_new_name(
    text: str, old: str, new: str, tmp_path: Path, home: Home
) -> None:
    path = written(tmp_path, f"model: {{id: demo}}\n{text}")
    with pytest.raises(SetupError) as refused:
        presets.load(path, home)
    assert f"`{old}` is called `{new}` now" in str(refused.value)
