"""The home, the machine, processes and ports as the system tells them."""

import errno
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from mlxstack.control import start
from mlxstack.core.errors import SetupError, Taken
from mlxstack.core.formatting import size
from mlxstack.core.preset import ModelSpec, Preset, ServerSpec, SlotSpec
from mlxstack.host.hardware import (
    OPENBLAS,
    SLEEP_AFTER,
    SLEEP_AFTER_CYCLES,
    TUNABLES,
    blas_sleep,
    chip,
    find_openblas,
    malloc_tunables,
    preload,
    this_hardware,
)
from mlxstack.host.home import Home, home_from, make_folder, make_home
from mlxstack.host.process import (
    end,
    free_port,
    identify,
    is_alive,
    kill,
    listener,
    refusal,
    wait_gone,
)
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.net


def test_the_home_is_where_the_variable_says(tmp_path: Path) -> None:
    assert home_from({"MLX_STACK_HOME": str(tmp_path)}).root == tmp_path
    assert home_from({}).root == Path("~/.mlx-stack").expanduser()
    assert home_from({"MLX_STACK_HOME": ""}).root == Path("~/.mlx-stack").expanduser()


def test_everything_in_the_home_is_private(tmp_path: Path) -> None:
    home = Home(tmp_path / "a" / "home")
    make_home(home)
    for folder in (home.root, home.run, home.logs, home.run / "plans", home.root.parent):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_machine_tells_memory_cores_and_chip() -> None:
    here = this_hardware()
    assert here.total_bytes > here.available_bytes > 0
    assert here.n_cores >= 1
    assert here.chip


@pytest.mark.skipif(platform.system() != "Linux", reason="reads cpuinfo")
def test_the_chip_is_read_from_cpuinfo(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Fast CPU 3000\n")
    assert chip(cpuinfo) == "Fast CPU 3000"
    assert chip(tmp_path / "none") == platform.machine()


@pytest.mark.skipif(platform.system() != "Linux", reason="only Linux preloads")
def test_the_threaded_openblas_is_preferred(tmp_path: Path) -> None:
    assert find_openblas((str(tmp_path),)) is None
    for folder in (".", "openblas-serial", "openblas-pthread"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / OPENBLAS).touch()
    assert find_openblas((str(tmp_path),)) == tmp_path / "openblas-pthread" / OPENBLAS


def test_malloc_is_tuned_on_linux_and_what_the_user_set_stays() -> None:
    huge, arenas = TUNABLES
    name = "GLIBC_TUNABLES"
    assert malloc_tunables({}, "Linux") == {name: f"{huge}:{arenas}"}
    assert malloc_tunables({}, "Darwin") == {}
    other = "glibc.malloc.check=1"
    assert malloc_tunables({name: other}, "Linux") == {name: f"{other}:{huge}:{arenas}"}
    assert malloc_tunables({"MALLOC_ARENA_MAX": "8"}, "Linux") == {name: huge}
    small = "glibc.malloc.hugetlb=0"
    assert malloc_tunables({name: small}, "Linux") == {name: f"{small}:{arenas}"}
    assert malloc_tunables({name: f"{small}:glibc.malloc.arena_max=8"}, "Linux") == {}


def test_preload_is_added_to_what_is_there_and_never_twice() -> None:
    library = Path("/lib/libopenblas.so.0")
    assert preload({}, library) == {"LD_PRELOAD": str(library)}
    assert preload({"LD_PRELOAD": "/a.so"}, library) == {"LD_PRELOAD": f"{library}:/a.so"}
    assert preload({"LD_PRELOAD": str(library)}, library) == {}
    assert preload({}, None) == {}


def test_idle_blas_threads_sleep_unless_the_user_set_when() -> None:
    assert blas_sleep({}, "Linux") == {SLEEP_AFTER: SLEEP_AFTER_CYCLES}
    assert blas_sleep({SLEEP_AFTER: "26"}, "Linux") == {}
    assert blas_sleep({}, "Darwin") == {}


def test_a_process_is_not_a_later_one_of_the_same_number() -> None:
    me = identify(os.getpid())
    assert me is not None and is_alive(me)
    assert not is_alive(msgspec.structs.replace(me, born=me.born - 10))
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    seen = identify(child.pid)
    assert seen is not None
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(seen), "a zombie is not alive"
    child.wait()
    assert not is_alive(seen)
    assert identify(child.pid) is None


def test_end_asks_first_and_kills_the_deaf() -> None:
    script = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, {}); print(1, flush=True); "
        "time.sleep(600)"
    )
    polite = script.format("lambda *_: sys.exit(print('asked', flush=True))")
    deaf = script.format("signal.SIG_IGN")
    for code, patience_s, last in ((polite, 600, b"asked\n"), (deaf, 0.5, b"")):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            seen = identify(child.pid)
            assert seen is not None
            end(seen, patience_s)
            assert not is_alive(seen)
            assert child.stdout.read() == last


def test_a_taken_port_is_found_with_its_listener() -> None:
    port = free_port("127.0.0.1")
    assert refusal("127.0.0.1", port) is None
    with socket.create_server(("0.0.0.0", port)):
        taken = refusal("127.0.0.1", port)
        assert taken is not None and taken.errno == errno.EADDRINUSE
        assert f"(pid {os.getpid()})" in str(listener(port))
    assert refusal("127.0.0.1", port) is None


def test_a_free_port_is_none_that_the_system_gives_to_others() -> None:
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(given.read_text().split()[0]) if given.exists() else 49_152
    assert all(1024 < free_port("127.0.0.1") < first for _ in range(100))
    with pytest.raises(OSError, match="assign"):
        free_port("192.0.2.1")


def preset(**parts: object) -> Preset:
    return Preset(**({"model": ModelSpec("demo"), "name": "p"} | parts))  # type: ignore[arg-type]


def test_a4_a_slot_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "slots"
    with pytest.raises(SetupError) as caught:
        start.check_files(preset(slots=SlotSpec(save_path=str(folder))))
    assert caught.value.message.startswith("slots.save_path")
    assert str(folder) in caught.value.message
    with pytest.raises(SetupError, match="is a file, but a folder is needed"):
        make_folder(tmp_path / "file")


def test_a4_a_new_slot_folder_is_private(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "slots"
    start.check_files(preset(slots=SlotSpec(save_path=str(folder))))
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("/no/such/model", "there is no folder /no/such/model"),
        ("nonsense", "must be `demo`, a folder that starts"),
        ("a/b/c", "must be `demo`"),
    ],
)
def test_a_missing_model_is_refused_before_start(model: str, text: str) -> None:
    with pytest.raises(SetupError, match=text):
        start.check_files(preset(model=ModelSpec(model)))


def test_a_model_folder_holds_a_config(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"holds no config\.json"):
        start.check_files(preset(model=ModelSpec(str(tmp_path))))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SetupError, match="holds no weights"):
        start.check_files(preset(model=ModelSpec(str(tmp_path))))
    (tmp_path / "model.safetensors").touch()
    start.check_files(preset(model=ModelSpec(str(tmp_path))))
    start.check_files(preset(model=ModelSpec("mlx-community/any")))
    with pytest.raises(SetupError, match=r"model\.adapter: there is no folder"):
        start.check_files(preset(model=ModelSpec("demo", adapter="/no/lora")))
    with pytest.raises(SetupError, match=r"model\.draft: there is no folder"):
        start.check_files(preset(model=ModelSpec("demo", draft="/no/draft")))


def test_an_adapter_folder_holds_what_the_tuner_wrote(tmp_path: Path) -> None:
    wanted = preset(model=ModelSpec("demo", adapter=str(tmp_path)))
    with pytest.raises(SetupError, match=r"model\.adapter: .* holds no adapter_config\.json"):
        start.check_files(wanted)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(SetupError, match=r"holds no adapters\.safetensors"):
        start.check_files(wanted)
    (tmp_path / "adapters.safetensors").touch()
    start.check_files(wanted)


def test_a15_a_taken_port_says_who_and_what_to_do(tmp_path: Path) -> None:
    home = Home(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(Taken) as caught:
            start.check_port(ServerSpec(port=port), home)
    assert f"pid {os.getpid()}" in caught.value.message
    assert "--port" in caught.value.message
    with pytest.raises(SetupError, match=r"nothing can listen on 192\.0\.2\.1"):
        start.check_port(ServerSpec(host="192.0.2.1", port=port), home)


def test_amounts_are_told_in_the_unit_that_fits() -> None:
    assert size(12.34 * 2**30) == "12.3 GiB"
    assert size(45 * 2**20) == "45 MiB"


@pytest.mark.skipif(sys.platform != "linux", reason="only there the birth is told by the clock")
def test_a15_a_process_stays_itself_when_the_clock_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    me = identify(os.getpid())
    assert me is not None and is_alive(me)
    assert not is_alive(msgspec.structs.replace(me, boot="another"))
    told = psutil.boot_time()
    born = psutil.Process().create_time()
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: told + 3600)  # type: ignore[attr-defined]
    assert psutil.Process().create_time() > born + 1800
    assert is_alive(me)
    assert identify(os.getpid()) == me


def test_a_process_whose_parent_reads_no_exit_status_is_gone() -> None:
    """As the supervisor of a member, whose parent is a gateway."""
    script = "sleep 999 & echo $!; exec sleep 999"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = identify(int(parent.stdout.readline()))
        assert child is not None
        kill(child)
        assert wait_gone(child, PATIENCE_S)
        is_zombie = psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE
        parent.kill()
    assert is_zombie
