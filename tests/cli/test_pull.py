"""Models on this machine: `pull` against a hub of our own, `models` and `rm`."""

import hashlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import hub
from tests.cli.terminal import CLI
from tests.cli.test_messages import run
from tests.models import LLAMA
from tests.patience import PATIENCE_S, wait_until

pytestmark = pytest.mark.net

WEIGHTS = "model.safetensors"
FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"


def shard(n_bytes: int) -> bytes:
    """A safetensors file with one tensor of so many bytes."""
    tensor = {"dtype": "U8", "shape": [n_bytes], "data_offsets": [0, n_bytes]}
    header = json.dumps({f"w{n_bytes}": tensor})
    return len(header).to_bytes(8, "little") + header.encode() + bytes(n_bytes)


def model_files(**more: bytes) -> dict[str, bytes]:
    config = LLAMA | {"quantization": {"group_size": 64, "bits": 4}}
    return {"config.json": json.dumps(config).encode(), WEIGHTS: shard(1000), **more}


def test_pull_tells_lines_when_piped_and_the_model_is_listed_and_removed(tmp_path: Path) -> None:
    with hub.serving(model_files()) as here:
        env = here.env(tmp_path / "hf")
        done = run(tmp_path, "pull", hub.MODEL, **env)
        assert done.returncode == 0, done.stderr
        lines = done.stderr.splitlines()
        assert re.fullmatch(r"org/tiny: [\d.]+ KiB to download", lines[0])
        size = r"[\d.]+ (?:B|[KM]iB)"
        told = rf"downloading org/tiny: \d+ %, {size} of {size}, {size}/s, \d+s left"
        assert any(re.fullmatch(told, line) for line in lines[1:]), lines
        assert "org/tiny is here after" in done.stdout
        again = run(tmp_path, "pull", hub.MODEL, **env)
        assert "org/tiny is here already" in again.stdout
        assert here.fetched.count(WEIGHTS) == 1
    listed = json.loads(run(tmp_path, "models", "--json", **env).stdout)["models"]
    (one,) = listed
    assert (one["name"], one["quantization"], one["fits"]) == (hub.MODEL, "4 bit", "yes")
    assert one["is_complete"] and one["n_trained"] == LLAMA["max_position_embeddings"]
    row = run(tmp_path, "ls", **env).stdout.splitlines()[1]
    assert row.split()[0] == hub.MODEL and row.split()[-1] == "today"
    silent = run(tmp_path, "rm", hub.MODEL, **env)
    assert silent.returncode == 2 and "`--yes` deletes without asking" in silent.stderr
    cache = Path(env["HF_HOME"]) / "hub"
    shutil.copytree(cache / "models--org--tiny", cache / "models--other--tiny", symlinks=True)
    unclear = run(tmp_path, "rm", "tiny", "--yes", **env)
    assert (
        unclear.returncode == 2 and "several models are called tiny: org/tiny (" in unclear.stderr
    )
    other = run(tmp_path, "rm", "other/tiny", "--yes", **env)
    assert other.returncode == 0 and "other/tiny is deleted" in other.stdout
    gone = run(tmp_path, "rm", hub.MODEL, "--yes", **env)
    assert gone.returncode == 0 and "is deleted" in gone.stdout
    assert "no models in" in run(tmp_path, "models", **env).stderr


def broken_config(folder: Path, snapshot: Path) -> None:
    (snapshot / "config.json").resolve().write_bytes(b"{")


def damaged_header(folder: Path, snapshot: Path) -> None:
    (snapshot / WEIGHTS).resolve().write_bytes(b"\xff" * 8)


def link_to_nothing(folder: Path, snapshot: Path) -> None:
    (snapshot / "config.json").resolve().unlink()


def links_to_nothing(folder: Path, snapshot: Path) -> None:
    shutil.rmtree(folder / "blobs")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (broken_config, "config.json is not what it should be"),
        (damaged_header, f"the header of .*{WEIGHTS} is damaged"),
        (link_to_nothing, "config.json is a link to no file"),
        (links_to_nothing, "is a link to no file"),
    ],
)
def test_an_unreadable_model_is_listed_with_its_fault_and_removed(
    tmp_path: Path, damage: Callable[[Path, Path], None], reason: str
) -> None:
    with hub.serving(model_files()) as here:
        env = here.env(tmp_path / "hf")
        assert run(tmp_path, "pull", hub.MODEL, **env).returncode == 0
    folder = Path(env["HF_HOME"]) / "hub" / "models--org--tiny"
    (snapshot,) = (folder / "snapshots").iterdir()
    shutil.copytree(folder, folder.with_name("models--org--tiny-2"), symlinks=True)
    damage(folder, snapshot)
    told = run(tmp_path, "models", **env)
    assert re.search(f"org/tiny is unreadable: .*{reason}.*`mlx-stack rm org/tiny`", told.stderr)
    assert "org/tiny-2" not in told.stderr
    listed = json.loads(run(tmp_path, "models", "--json", **env).stdout)["models"]
    assert [(one["name"], one["fits"]) for one in listed] == [
        (hub.MODEL, "unreadable"),
        ("org/tiny-2", "yes"),
    ]
    gone = run(tmp_path, "rm", hub.MODEL, "--yes", **env)
    assert gone.returncode == 0 and "org/tiny is deleted" in gone.stdout, gone.stderr
    assert [one.name for one in folder.parent.glob("models--*")] == ["models--org--tiny-2"]


def test_a_model_on_another_disk_is_deleted_whole(tmp_path: Path) -> None:
    """A link in the cache leads there; a file that another model holds too stays."""
    with hub.serving(model_files()) as here:
        env = here.env(tmp_path / "hf")
        assert run(tmp_path, "pull", hub.MODEL, **env).returncode == 0
    cache = Path(env["HF_HOME"]) / "hub"
    disk = tmp_path / "disk"
    shutil.copytree(cache / "models--org--tiny", disk, symlinks=True)
    (cache / "models--other--tiny").symlink_to(disk)
    (blob,) = (one for one in (disk / "blobs").iterdir() if one.stat().st_size > 1000)
    shared = tmp_path / "shared"
    blob.rename(shared)
    blob.symlink_to(shared)
    told = json.loads(run(tmp_path, "rm", "other/tiny", "--yes", "--json", **env).stdout)
    assert told["n_freed"] == sum(len(body) for body in model_files().values()) - len(shard(1000))
    assert not disk.exists() and shared.exists()
    assert [one.name for one in cache.glob("models--*")] == ["models--org--tiny"]


def test_a_reference_that_cannot_be_read_hides_no_model(tmp_path: Path) -> None:
    """The hub's client ends a scan of its cache there."""
    with hub.serving(model_files()) as here:
        env = here.env(tmp_path / "hf")
        assert run(tmp_path, "pull", hub.MODEL, **env).returncode == 0
    folder = Path(env["HF_HOME"]) / "hub" / "models--org--tiny"
    (folder / "refs" / "other").write_bytes(b"\xff")
    listed = json.loads(run(tmp_path, "models", "--json", **env).stdout)["models"]
    assert [(one["name"], one["fits"]) for one in listed] == [(hub.MODEL, "yes")]
    found = json.loads(run(tmp_path, "doctor", "--json", **env).stdout)["findings"]
    assert any(one["detail"].startswith("1 downloaded, ") for one in found)


def test_an_empty_address_of_the_hub_is_none(tmp_path: Path) -> None:
    nowhere = {"HTTPS_PROXY": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hf")}
    done = run(tmp_path, "pull", hub.MODEL, HF_ENDPOINT="", **nowhere)
    assert done.returncode == 5
    assert "https://huggingface.co cannot be reached" in done.stderr


@pytest.mark.parametrize("name", ["ALL_PROXY", "https_proxy"])
def test_a_socks_proxy_is_refused_by_the_variable_with_a_remedy(tmp_path: Path, name: str) -> None:
    away = {name: "socks4://127.0.0.1:9", "HF_HOME": str(tmp_path / "hf")}
    done = run(tmp_path, "pull", hub.MODEL, **away)
    assert done.returncode == 5
    assert f"through {name}: " in done.stderr
    assert f"`unset {name}`" in done.stderr
    assert "'.[socks]'" in done.stderr


@pytest.mark.parametrize(
    "away",
    [
        {"HTTPS_PROXY": "http://[::1:9"}, {"all_proxy": "http://host:port", "NO_PROXY": "::1/128"},
    ],
)  # fmt: skip
def test_an_address_of_a_proxy_that_cannot_be_read_is_named(
    tmp_path: Path, away: dict[str, str]
) -> None:
    done = run(tmp_path, "pull", hub.MODEL, HF_HOME=str(tmp_path / "hf"), **away)
    assert done.returncode == 5
    assert f"`unset {' '.join(sorted(away))}`" in done.stderr


def test_an_earlier_download_is_named_where_the_newest_is_unknown(tmp_path: Path) -> None:
    with hub.serving(model_files()) as here:
        env = here.env(tmp_path / "hf")
        assert run(tmp_path, "pull", hub.MODEL, **env).returncode == 0
    folder = Path(env["HF_HOME"]) / "hub" / "models--org--tiny"
    shutil.rmtree(folder / "refs")
    (snapshot,) = (folder / "snapshots").iterdir()
    done = run(tmp_path, "plan", hub.MODEL, HF_HUB_OFFLINE="1", **env)
    assert done.returncode == 5
    assert f"an earlier one is: `mlx-stack up {snapshot}`" in done.stderr


def test_pull_draws_a_bar_on_a_terminal(tmp_path: Path) -> None:
    with hub.serving(model_files()) as here:
        ours, theirs = pty.openpty()
        env = os.environ | here.env(tmp_path / "hf") | {"MLX_STACK_HOME": str(tmp_path)}
        process = subprocess.Popen(
            [*CLI, "pull", hub.MODEL],
            env=env | {"TERM": "xterm-256color", "COLUMNS": "100"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        drawn = _read_all(ours)
        assert process.wait(PATIENCE_S) == 0
    assert "100 %" in drawn
    assert "━" in drawn
    assert "KiB" in drawn and "/s" in drawn


def test_pull_goes_on_after_kill_9(tmp_path: Path) -> None:
    index = {"weight_map": {"a": FIRST, "b": SECOND}}
    files = model_files(
        **{
            "model.safetensors.index.json": json.dumps(index).encode(),
            FIRST: shard(1000),
            SECOND: shard(24 * 2**20),
        }
    )
    del files[WEIGHTS]
    with hub.serving(files) as here:
        env = os.environ | here.env(tmp_path / "hf") | {"MLX_STACK_HOME": str(tmp_path)}
        process = subprocess.Popen([*CLI, "pull", hub.MODEL], env=env, stderr=subprocess.DEVNULL)
        assert here.is_held.wait(PATIENCE_S)
        blobs = tmp_path / "hf" / "hub" / "models--org--tiny" / "blobs"
        _until(lambda: sum(file.suffix != ".incomplete" for file in blobs.iterdir()) == 3)
        _until(lambda: any(file.stat().st_size > 2**20 for file in blobs.glob("*.incomplete")))
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE_S)
        env_of_here = here.env(tmp_path / "hf")
        (half,) = json.loads(run(tmp_path, "models", "--json", **env_of_here).stdout)["models"]
        assert half["fits"] == "incomplete"
        (part,) = blobs.glob("*.incomplete")
        n_here = part.stat().st_size
        assert n_here > 2**20
        here.go_on.set()
        (blobs / "a-file-of-the-client.1234.incomplete").write_bytes(b"begun")
        done = run(tmp_path, "pull", hub.MODEL, **env_of_here)
        assert done.returncode == 0, done.stderr
        assert "are here already" in done.stderr
        assert here.fetched.count(FIRST) == 1
        assert here.fetched.count(SECOND) == 2
        assert here.resumed == [n_here]
        assert files[SECOND] in [blob.read_bytes() for blob in blobs.iterdir()]
        assert list(blobs.glob("*.incomplete")) == []
    (whole,) = json.loads(run(tmp_path, "models", "--json", **env_of_here).stdout)["models"]
    assert whole["is_complete"]


def test_of_two_copies_of_the_weights_the_shards_are_downloaded(tmp_path: Path) -> None:
    index = {"weight_map": {"a": FIRST, "b": SECOND}}
    shards = {FIRST: shard(1000), SECOND: shard(3000)}
    named = {"model.safetensors.index.json": json.dumps(index).encode()}
    with hub.serving(model_files(**shards, **named)) as here:
        env = here.env(tmp_path / "hf")
        done = run(tmp_path, "pull", hub.MODEL, **env)
        assert done.returncode == 0, done.stderr
        assert {FIRST, SECOND} <= {*here.fetched} and WEIGHTS not in here.fetched
        assert "org/tiny is here already" in run(tmp_path, "pull", hub.MODEL, **env).stdout
    (one,) = json.loads(run(tmp_path, "models", "--json", **env).stdout)["models"]
    assert one["is_complete"]


def test_a_part_that_is_damaged_is_never_taken_for_the_file(tmp_path: Path) -> None:
    body = shard(1000)
    with hub.serving(model_files(**{WEIGHTS: body})) as here:
        env = here.env(tmp_path / "hf")
        part = begun(tmp_path, body, 0)
        part.write_bytes(b"x" * 500)
        blobs = part.parent
        done = run(tmp_path, "pull", hub.MODEL, **env)
        assert done.returncode == 5
        assert "arrived damaged" in done.stderr and "pull it again" in done.stderr
        assert here.resumed == [500]
        assert [one.name for one in blobs.iterdir() if one.name.startswith(part.name[:64])] == []
        again = run(tmp_path, "pull", hub.MODEL, **env)
        assert again.returncode == 0, again.stderr
    assert (blobs / part.name[:64]).read_bytes() == body


def test_pull_refuses_a_full_disk_before_it_begins(tmp_path: Path) -> None:
    class Huge(bytes):
        """A file that says that it is larger than any disk."""

        def __len__(self) -> int:
            return 2**60

    with hub.serving(model_files(**{WEIGHTS: Huge()})) as here:
        done = run(tmp_path, "pull", hub.MODEL, **here.env(tmp_path / "hf"))
        assert here.fetched == []
    assert done.returncode == 5
    assert "and that disk has" in done.stderr and "mlx-stack rm" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("model", "files", "text"),
    [
        (hub.GATED, {}, "is gated: accept its license at"),
        (
            "org/tiny-4bit",
            model_files(),
            "the hub has no model org/tiny-4bit; did you mean org/tiny",
        ),
        (hub.MODEL, {"tiny.Q4_K_M.gguf": b"GGUF"}, "holds GGUF files, which llama.cpp reads; get"),
        (hub.MODEL, {"config.json": b"{}"}, "holds no safetensors weights"),
    ],
)
def test_an_error_of_the_hub_is_one_line_with_the_remedy(
    tmp_path: Path, model: str, files: dict[str, bytes], text: str
) -> None:
    with hub.serving(files) as here:
        done = run(tmp_path, "pull", model, **here.env(tmp_path / "hf"))
    assert done.returncode == 5
    assert text in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


REFUSED = [
    (
        401,
        "Invalid credentials in Authorization header",
        "the hub refuses org/tiny to this account",
    ),
    (403, "", "the hub refuses org/tiny to this account; `hf auth login`"),
    (501, "", "answers 501 for org/tiny; try again later"),
    (418, "short", "org/tiny: Client error '418"),
]


def test_a_status_of_the_hub_is_one_line(tmp_path: Path) -> None:
    with hub.serving(model_files()) as here:
        for status, message, expected in REFUSED:
            here.refuses = (status, message)
            done = run(tmp_path, "pull", hub.MODEL, **here.env(tmp_path / "hf"))
            assert done.returncode == 5
            assert expected in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_connection_that_breaks_is_taken_up_again(tmp_path: Path) -> None:
    body = shard(1000)
    with hub.serving(model_files(**{WEIGHTS: body})) as here:
        here.n_cuts = 1
        done = run(tmp_path, "pull", hub.MODEL, **here.env(tmp_path / "hf"))
        assert done.returncode == 0, done.stderr
        assert here.fetched.count(WEIGHTS) == 2
    blob = (
        tmp_path / "hf" / "hub" / "models--org--tiny" / "blobs" / hashlib.sha256(body).hexdigest()
    )
    assert blob.read_bytes() == body


def begun(tmp_path: Path, body: bytes, n_bytes: int) -> Path:
    """A part of a file in the cache, as an interrupted download leaves it."""
    part = tmp_path / "hf" / "hub" / "models--org--tiny" / "blobs"
    part.mkdir(parents=True)
    part /= f"{hashlib.sha256(body).hexdigest()}.part.incomplete"
    part.write_bytes(body[:n_bytes])
    return part


def test_a_hub_without_ranges_gives_the_whole_file_again(tmp_path: Path) -> None:
    body = shard(1000)
    part = begun(tmp_path, body, 600)
    with hub.serving(model_files(**{WEIGHTS: body})) as here:
        here.has_ranges = False
        done = run(tmp_path, "pull", hub.MODEL, **here.env(tmp_path / "hf"))
        assert done.returncode == 0, done.stderr
        assert here.resumed == [600]
    assert (part.parent / part.name[:64]).read_bytes() == body


def test_a_file_that_is_shorter_than_its_part_is_begun_again(tmp_path: Path) -> None:
    """The range is refused with 416; the next pull does not meet the same part."""
    body = shard(1000)
    part = begun(tmp_path, body, 600)
    with hub.serving(model_files(**{WEIGHTS: body})) as here:
        env = here.env(tmp_path / "hf")
        here.served[WEIGHTS] = body[:100]
        done = run(tmp_path, "pull", hub.MODEL, **env)
        assert done.returncode == 5
        assert "arrived damaged" in done.stderr and not part.exists()
        del here.served[WEIGHTS]
        again = run(tmp_path, "pull", hub.MODEL, **env)
        assert again.returncode == 0, again.stderr


def test_a_file_that_changes_on_the_hub_between_two_pulls_is_fetched_whole(tmp_path: Path) -> None:
    old = shard(1000)
    new = shard(1200)
    part = begun(tmp_path, old, 600)
    past = time.time() - 3600
    os.utime(part, (past, past))
    with hub.serving(model_files(**{WEIGHTS: new})) as here:
        done = run(tmp_path, "pull", hub.MODEL, **here.env(tmp_path / "hf"))
        assert done.returncode == 0, done.stderr
        assert here.resumed == []
    assert not part.exists()
    assert (part.parent / hashlib.sha256(new).hexdigest()).read_bytes() == new


def test_no_network_is_said(tmp_path: Path) -> None:
    env = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hf")}
    done = run(tmp_path, "pull", hub.MODEL, **env)
    assert done.returncode == 5
    assert "http://127.0.0.1:9 cannot be reached; check the network" in done.stderr
    offline = run(tmp_path, "pull", hub.MODEL, HF_HUB_OFFLINE="1", **env)
    assert "HF_HUB_OFFLINE forbids to ask the hub; unset it" in offline.stderr
    begun(tmp_path, b"weights", 3)
    half = run(tmp_path, "pull", hub.MODEL, **env)
    assert "org/tiny is here in part" in half.stderr
    assert "`mlx-stack pull org/tiny` goes on from there" in half.stderr
    assert {one.stderr.count("\n") for one in (done, offline, half)} == {1}


def _read_all(terminal: int) -> str:
    parts = []
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # Linux: the other side is closed.
            break
        if not data:
            break
        parts.append(data)
    os.close(terminal)
    return b"".join(parts).decode(errors="replace")


def _until(condition: Any) -> None:
    wait_until(condition)


@pytest.mark.parametrize("name", ["sha256", "etag", "commit"])
def test_a_name_of_the_hub_is_no_path(tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    with hub.serving(model_files()) as here:
        digest = hashlib.sha256(here.files[WEIGHTS]).hexdigest()
        paths = {"sha256": f"{victim}/{digest}", "etag": f"{victim}/name", "commit": f"{victim}"}
        here.forged = {name: paths[name]}
        done = run(tmp_path, "pull", hub.MODEL, **here.env(tmp_path / "hf"))
    assert done.returncode == 5 and "nothing" in done.stderr and "was written" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(victim.iterdir()) == []
