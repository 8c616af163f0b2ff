"""Any model by its name: a hub id, a folder, a path in a cache; nothing but its config is read."""

import json
import shutil
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from mlxstack.core.preset import BatchSpec
from mlxstack.core.request import SamplingParams
from mlxstack.policy.default_sampling import SHAPES, described
from tests import forked, hub
from tests.cli.terminal import Shell
from tests.conftest import ModelOf
from tests.patience import PATIENCE_S
from tests.repetition import in_soak

pytestmark = [pytest.mark.mlx, pytest.mark.net]

NAME = "tiny-org/tiny-llama"
N_CTX = 1024
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


def assert_kv_is_as_planned(shell: Shell, model: str) -> None:
    """Fill a slot of N_CTX tokens, and compare its bytes with the plan of `model`.

    Sliding windows are held once live and once in each checkpoint.
    """
    url = next(one["url"] for one in shell.services().values() if one["state"] == "healthy")
    long = {"messages": [{"role": "user", "content": "one two three " * 100}], "max_tokens": 4}
    assert (
        httpx.post(f"{url}/v1/chat/completions", json=long, timeout=PATIENCE_S).status_code == 200
    )
    filled = max(httpx.get(f"{url}/slots").json(), key=lambda slot: slot["n_tokens"])
    assert filled["n_tokens"] > N_CTX - 256, "the last block of tokens is begun"
    sizes = ("--ctx", str(N_CTX), "--ctx", str(N_CTX // 2))
    plan = json.loads(shell.run("plan", model, *sizes, "--json").stdout)
    kv = {one["n_ctx"]: one["precisions"][0]["kv_bytes"] for one in plan["contexts"]}
    windows = 2 * kv[N_CTX // 2] - kv[N_CTX]
    n_checkpoints = round((filled["n_bytes"] - kv[N_CTX]) / windows) if windows else 0
    expected = kv[N_CTX] + n_checkpoints * windows
    assert filled["n_bytes"] == pytest.approx(expected, rel=0.01) and n_checkpoints <= 2


def measured_model(shell: Shell, model: str) -> str:
    """The name of the model that `bench` measured."""
    speed = shell.run("bench", "--model", model, "--seconds", "1", "--json")
    assert speed.returncode == 0, speed.stderr
    return str(json.loads(speed.stdout)["model"])


def test_a_hub_id_is_planned_started_swapped_and_found_again(
    shell: Shell, model_of: ModelOf
) -> None:
    del shell.env["MLX_STACK_WORKER"]
    folder = model_of("tiny")
    files = hub.files_of(folder) | {"generation_config.json": b'{"temperature": 0.5, "top_k": 7}'}
    with ExitStack() as stack:
        with hub.serving(files, NAME) as here:
            shell.env |= here.env(shell.folder / "hf")
            stack.enter_context(forked.preloaded(shell.env))
            plan = json.loads(shell.run("plan", NAME, "--json").stdout)
            assert plan["spec"]["weights_from"] == "estimated"
            assert plan["wanted"]["fits"]
            assert "model.safetensors" not in here.fetched
            up = shell.run("up", NAME, "--port", str(shell.port), "--ctx", "1k", "--slots", "2")
            assert up.returncode == 0, up.stderr
        check_downloaded(shell, up.stdout, folder)


def check_downloaded(shell: Shell, told: str, folder: Path) -> None:
    """Check a model that was started as `told`, without its hub; swap it with `folder`."""
    rows = {line.split()[0]: line for line in told.splitlines() if line.strip()}
    assert rows["slots.n_ctx"].split()[1:3] == ["1024", "given"]
    assert rows["slots.count"].split()[1:3] == ["2", "given"]
    assert "temperature 0.5, top_k 7" in rows["sampling"]
    assert "generation_config.json" in rows["sampling"]
    service = shell.services()["tiny-llama"]
    assert (service["state"], service["n_slots"], service["n_ctx"]) == ("healthy", 2, 1024)
    answer = httpx.post(f"{service['url']}/v1/chat/completions", json=CHAT, timeout=PATIENCE_S)
    assert answer.status_code == 200 and answer.json()["model"] == NAME
    assert_kv_is_as_planned(shell, NAME)
    kept = shell.run("rm", NAME, "--yes")
    assert kept.returncode == 4, kept.stderr
    assert "is served by `tiny-llama`; `mlx-stack down tiny-llama` stops it first" in kept.stderr
    assert shell.run("up", NAME).returncode == 0
    said = shell.run("chat", NAME, "-p", "hello", "--max-tokens", "8")
    assert said.returncode == 0 and "tok/s" in said.stderr
    assert measured_model(shell, NAME) == NAME
    assert "n_ctx: 1024" in (shell.home / "derived" / "tiny-llama.yaml").read_text()
    swapped = shell.run("swap", str(folder))
    assert swapped.returncode == 0, swapped.stderr
    assert "slots.count" in swapped.stdout
    answer = httpx.post(f"{service['url']}/v1/chat/completions", json=CHAT, timeout=PATIENCE_S)
    assert answer.json()["model"] == folder.name
    assert shell.run("swap", NAME).returncode == 0
    assert shell.run("rm", NAME, "--yes").returncode == 4
    assert shell.run("down").returncode == 0
    again = shell.run("up", "tiny-llama", "--port", str(shell.port), "--dry-run")
    assert f"id: {NAME}\n" in again.stdout


def test_a_folder_and_a_path_in_a_cache_are_models(shell: Shell, model_of: ModelOf) -> None:
    del shell.env["MLX_STACK_WORKER"]
    folder = model_of("tiny-swa")
    up = shell.run("up", str(folder), "--port", str(shell.port), "--ctx", "1k")
    assert up.returncode == 0, up.stderr
    assert shell.services()["tiny-swa"]["n_ctx"] == N_CTX
    ran = shell.run("run", "openai", "--model", str(folder), "--", "sh", "-c", "echo $OPENAI_MODEL")
    assert (ran.returncode, ran.stdout) == (0, "tiny-swa\n"), ran.stderr
    said = shell.run("chat", str(folder), "-p", "hello", "--max-tokens", "8")
    assert said.returncode == 0 and "tok/s" in said.stderr
    assert measured_model(shell, str(folder)) == folder.name
    assert_kv_is_as_planned(shell, str(folder))
    snapshot = shell.folder / "cache" / "models--org--tiny" / "snapshots" / hub.COMMIT
    snapshot.parent.mkdir(parents=True)
    shutil.copytree(folder, snapshot)
    found = json.loads(shell.run("up", str(snapshot.parents[1]), "--dry-run", "--json").stdout)
    assert found["preset"]["model"]["id"] == str(snapshot)
    assert found["preset"]["name"] == "tiny"
    assert found["preset"]["slots"]["count"] >= 2


def test_presets_new_writes_down_what_up_would_choose(shell: Shell, model_of: ModelOf) -> None:
    folder = model_of("tiny")
    made = shell.run("presets", "new", "mine", "--from", str(folder), "--ctx", "2k")
    assert made.returncode == 0, made.stderr
    text = (shell.home / "presets" / "mine.yaml").read_text()
    assert f"id: {folder}" in text and "n_ctx: 2048" in text
    again = shell.run("presets", "new", "mine", "--from", str(folder))
    assert again.returncode == 4 and "exists already" in again.stderr
    short = shell.run("presets", "new", "short", "--from", "demo", "--slots", "1")
    assert short.returncode == 0
    shown = json.loads(shell.run("presets", "show", "short", "--json").stdout)["preset"]
    assert (shown["slots"]["count"], shown["model"]["id"]) == (1, "demo")
    assert not Path(shell.home / "derived").exists()


def test_a_second_model_of_the_same_name_is_refused_and_leaves_the_first(
    shell: Shell, model_of: ModelOf
) -> None:
    first = shell.folder / "a" / "twin"
    second = shell.folder / "b" / "twin"
    for folder in (first, second):
        shutil.copytree(model_of("tiny"), folder)
    dry = shell.run("up", str(first), "--ctx", "1k", "--dry-run")
    assert dry.returncode == 0 and f"id: {first}\n" in dry.stdout
    assert not (shell.home / "derived").exists()
    up = shell.run("up", str(first), "--port", str(shell.port), "--ctx", "1k")
    assert up.returncode == 0, up.stderr
    kept = (shell.home / "derived" / "twin.yaml").read_text()
    for args in (("chat", "-p", "hi"), ("up",), ("up", "--if-needed")):
        refused = shell.run(args[0], str(second), *args[1:])
        assert refused.returncode == 4 and refused.stdout.count("ready") == 0, args
        assert f"`twin` is already running with the model {first}" in refused.stderr
        assert f"`mlx-stack up {second} --name NAME`" in refused.stderr
    assert shell.run("up", str(second), "--dry-run").returncode == 0
    assert (shell.home / "derived" / "twin.yaml").read_text() == kept
    other = shell.run("up", str(second), "--name", "other", "--port", "0", "--ctx", "1k")
    assert other.returncode == 0, other.stderr
    assert shell.run("up", str(second), "--name", "other", "--if-needed").returncode == 0
    for name, folder in (("twin", first), ("other", second)):
        assert shell.run("restart", name).returncode == 0
        served = json.loads((shell.home / "run" / "presets" / f"{name}.json").read_text())
        assert (served["model"]["id"], served["model"]["alias"]) == (str(folder), "twin")
        assert served["slots"]["save_path"] == str(shell.home / "slots" / name)


def test_a_preset_of_ones_own_extends_the_shipped_one_of_its_name(shell: Shell) -> None:
    made = shell.run("presets", "new", "demo", "--from", "demo", "--slots", "2")
    assert made.returncode == 0, made.stderr
    (shell.home / "presets" / "above.yaml").write_text("extends: demo\nslots: {n_ctx: 512}\n")
    for name, n_ctx in (("demo", 4096), ("above", 512)):
        shown = json.loads(shell.run("presets", "show", name, "--json").stdout)["preset"]
        assert (shown["slots"]["count"], shown["slots"]["n_ctx"]) == (2, n_ctx)
    (shell.home / "presets" / "own.yaml").write_text("extends: own\n")
    assert "in a circle: own -> own" in shell.run("presets", "show", "own").stderr


def test_presets_new_writes_no_preset_that_is_invalid(shell: Shell, model_of: ModelOf) -> None:
    for source in ("demo", str(model_of("tiny"))):
        made = shell.run("presets", "new", "bad", "--from", source, "--kv-bits", "5")
        assert made.returncode == 5 and "kv.bits is `5`" in made.stderr, made.stderr
        assert not (shell.home / "presets").exists()


def test_another_preset_of_a_running_name_is_refused(shell: Shell, model_of: ModelOf) -> None:
    assert shell.up().returncode == 0
    assert shell.up("--if-needed").returncode == 0
    other = shell.folder / "other" / "tiny.yaml"
    other.parent.mkdir()
    other.write_text(f"extends: demo\nmodel: {{id: {model_of('tiny')}}}\n")
    refused = shell.run("up", str(other), "--if-needed")
    assert refused.returncode == 4
    assert "`tiny` is already running with the model demo" in refused.stderr
    assert f"`mlx-stack up {other} --name NAME`" in refused.stderr


@pytest.mark.parametrize(
    "card, shown, is_greedy",
    [
        *in_soak((None, "temperature 0.8, top_k 40, top_p 0.95, min_p 0.05", False)),
        ({"eos_token_id": 2}, "temperature 0.8, top_k 40, top_p 0.95, min_p 0.05", False),
        ({"do_sample": False}, "greedy", True),
        ({"temperature": 0.5, "top_k": 7}, "temperature 0.5, top_k 7", False),
    ],
    ids=["no file", "token ids only", "do_sample false", "recommended"],
)
def test_the_sampling_that_is_shown_is_the_one_that_is_used(
    shell: Shell, model_of: ModelOf, card: dict[str, object] | None, shown: str, is_greedy: bool
) -> None:
    del shell.env["MLX_STACK_WORKER"]
    folder = shell.folder / "carded"
    shutil.copytree(model_of("tiny"), folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if card is not None:
        (folder / "generation_config.json").write_text(json.dumps(card))
    up = shell.run("up", str(folder), "--port", str(shell.port), "--ctx", "1k", "--slots", "1")
    assert up.returncode == 0, up.stderr
    row = next(line for line in up.stdout.splitlines() if line.startswith("sampling"))
    assert f" {shown}  " in row
    url = f"http://127.0.0.1:{shell.port}"
    params = httpx.get(f"{url}/props").json()["default_generation_settings"]["params"]
    used = described(SamplingParams(**{name: params[name] for name in SHAPES}))
    assert used == shown
    body = {"prompt": "one two", "n_predict": 16, "ignore_eos": True, "return_tokens": True}
    answers = {
        tuple(httpx.post(f"{url}/completion", json=body | {"seed": seed}).json()["tokens"])
        for seed in range(4)
    }
    assert (len(answers) == 1) == is_greedy


def test_as_many_slots_as_a_batch_has_rows_where_they_fit(shell: Shell, model_of: ModelOf) -> None:
    folder = str(model_of("tiny"))
    found = shell.run("up", folder, "--dry-run", "--json")
    assert json.loads(found.stdout)["preset"]["slots"]["count"] == BatchSpec().max_size
    given = shell.run("up", folder, "--dry-run", "--json", "--slots", "3")
    assert json.loads(given.stdout)["preset"]["slots"]["count"] == 3
