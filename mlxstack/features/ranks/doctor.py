"""Checks of the machines of `hosts`, by a process on each."""

import hmac
import secrets
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BufferedRWPair
from subprocess import Popen
from tempfile import TemporaryFile
from typing import IO

import msgspec
from msgspec import Struct

from mlxstack.cli.check_result import CheckLevel, CheckResult
from mlxstack.cli.doctor import bad, ok, warn_if
from mlxstack.core.formatting import printable
from mlxstack.core.preset import ModelSpec
from mlxstack.features.ranks import hosts as ranks
from mlxstack.features.ranks import probe as rank_probe
from mlxstack.features.ranks.probe import (
    FilesDigest,
    Greeting,
    LinkListener,
    LinkSpeed,
    ProbeRequest,
)
from mlxstack.host.macos import LOCAL_NETWORK, is_local_network_refused
from mlxstack.policy.memory.capacity import Division, ModelShape

REACH_S = 30.0
"""Seconds for a process on another machine to start and connect."""
HELLO_S = 2.0
POLL_S = 0.1
MAX_CLOCK_S = 2.0
SSH_FAILED = 255
NETWORK = "name each machine by its address on the fastest link, and let Python through firewalls"


class Unreached(Exception):
    """A machine where no process answers; `remedy` as in `CheckResult`."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.remedy = remedy


class ProbeConnection(Struct, frozen=True):
    """Connection to a probe; its clock is `ahead_s` seconds ahead."""

    connection: socket.socket
    stream: BufferedRWPair
    versions: dict[str, str]
    ahead_s: float


def examine_hosts(
    hosts: Sequence[str],
    model: ModelSpec | None = None,
    shape: ModelShape | None = None,
    patience_s: float = REACH_S,
) -> Iterator[CheckResult]:
    """Check all machines but the first, which is this one.

    With `model` its files are compared; with `shape` the cost of a decode step is told, unless
    machines compute whole layers.
    """
    try:
        own = socket.gethostbyname(hosts[0])
        socket.create_server((own, 0)).close()
    except OSError as error:
        detail = f"{hosts[0]} is no address of this machine: {error.strerror}"
        remedy = "name this machine first, by the address at which the others reach it"
        yield bad("hosts", detail, remedy)
        return
    files = None
    if model is not None:
        files = rank_probe.digest_files(model)
    links: list[LinkSpeed] = []
    for host in hosts[1:]:
        try:
            address = socket.gethostbyname(host)
            with _probing(host, own, patience_s) as probed:
                way = "by SSH, without a prompt"
                if ranks.is_here(host):
                    way = "on this machine"
                yield ok("reach", f"{host}: a process started {way}")
                yield from _versions(host, probed.versions)
                yield _clock(host, probed.ahead_s)
                rank_probe.send(probed.stream, ProbeRequest(address, model))
                yield _link(host, address, rank_probe.receive(probed.stream, LinkListener), links)
                if model is not None and files is not None:
                    yield compare_files(
                        host, model, files, rank_probe.receive(probed.stream, FilesDigest)
                    )
        except Unreached as error:
            yield bad("reach", f"{host}: {error}", error.remedy)
        except (OSError, msgspec.MsgspecError) as error:
            yield bad("reach", f"{host}: {error}", network_remedy(error))
    if shape is not None and shape.division is Division.TENSOR and links:
        n_layers = len(shape.geometry.layers)
        step_s = max(sums_s(n_layers, shape.hidden, len(hosts), link) for link in links)
        detail = f"a decode step pays {step_s * 1e3:.1f} ms for {2 * n_layers} sums of all machines"
        yield ok("step", detail)


def sums_s(n_layers: int, hidden: int, n_hosts: int, link: LinkSpeed) -> float:
    """Seconds of the sums of a decode step of one row.

    There are two per layer, of a row in half precision. In a ring of n machines each sends a n-th
    of it 2(n - 1) times.
    """
    n_messages = 2 * (n_hosts - 1)
    transfer_s = n_messages / n_hosts * 2 * hidden / link.bytes_per_s
    return 2 * n_layers * (n_messages / 2 * link.round_trip_s + transfer_s)


def compare_files(
    host: str, model: ModelSpec, own: FilesDigest, theirs: FilesDigest
) -> CheckResult:
    """Compare the files of a model, as ranks do at load."""
    remedy = f"get the same files on both: `mlx-stack pull {model.id}`, or copy the folder"
    for name, digest in (("this machine", own), (host, theirs)):
        if digest.problem:
            detail = f"{name}: {printable(digest.problem)}"
            return bad("model files", detail, remedy)
    if own == theirs:
        return ok("model files", f"{host}: {model.id}, as here")
    kind = "model code"
    if own.weights != theirs.weights:
        kind = "model files"
    detail = f"{host}: other {kind} of {model.id} than here"
    return bad("model files", detail, remedy)


def _versions(host: str, theirs: dict[str, str]) -> Iterator[CheckResult]:
    """Differences of versions. Python may differ: nothing of KV depends on it."""
    own = rank_probe.versions()
    remedy = "install the same version on both"
    for name, version in theirs.items():
        if version != own.get(name):
            level = CheckLevel.BAD
            if name == "Python":
                level = CheckLevel.WARN
            detail = f"{host}: {name} {printable(version)}, here {own.get(name)}"
            yield CheckResult(level, "versions", detail, remedy)
    if theirs == own:
        text = ", ".join(f"{name} {version}" for name, version in own.items())
        yield ok("versions", f"{host}: {text}, as here")


def _clock(host: str, ahead_s: float) -> CheckResult:
    """Difference of the clocks, up to the delay of a message."""
    detail = f"{host}: {abs(ahead_s):.2f} s {'ahead' if ahead_s > 0 else 'behind'}"
    remedy = "set both clocks by the network; logs and ages of KV files go by them"
    return warn_if(abs(ahead_s) > MAX_CLOCK_S, "clock", detail, remedy)


def _link(host: str, address: str, listener: LinkListener, links: list[LinkSpeed]) -> CheckResult:
    """Measure the connection to `address`, and add it to `links`."""
    problem = listener.problem
    remedy = NETWORK
    if not problem:
        try:
            link = rank_probe.measure_link(address, listener.port)
        except OSError as error:
            problem = f"{address} cannot be reached: {error}"
            remedy = network_remedy(error)
        else:
            links.append(link)
            speed = f"{link.bytes_per_s / 1e9:.2f} GB/s, {link.round_trip_s * 1e6:.0f} us"
            return ok("link", f"{host}: {speed} a round trip to {address}")
    return bad("link", f"{host}: {problem}", remedy)


def network_remedy(error: BaseException) -> str:
    """Remedy for a machine that cannot be reached."""
    if is_local_network_refused(error):
        return LOCAL_NETWORK
    return NETWORK


@contextmanager
def _probing(host: str, own: str, patience_s: float) -> Iterator[ProbeConnection]:
    """Start a probe as a rank is started. Raises Unreached, OSError."""
    key = secrets.token_hex(16)
    with socket.create_server((own, 0)) as listener, TemporaryFile() as output:
        address = f"{own}:{listener.getsockname()[1]}"
        try:
            process = ranks.start(host, address, key, rank_probe.MODULE, output)
        except FileNotFoundError as error:
            raise Unreached(f"there is no program `{error.filename}` here", "install it") from error
        try:
            probed = _accept(listener, process, key, time.monotonic() + patience_s)
            if probed is None:
                raise _unreached(host, process.poll(), output, patience_s)
            with probed.connection, probed.stream:
                yield probed
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.kill()
            process.wait()


def _accept(
    listener: socket.socket, process: "Popen[bytes]", key: str, until: float
) -> ProbeConnection | None:
    """Probe that shows `key`; None once it ended, or at `until`."""
    listener.settimeout(POLL_S)
    while time.monotonic() < until:
        has_ended = process.poll() is not None
        try:
            connection = listener.accept()[0]
        except TimeoutError:
            if has_ended:
                return None
            continue
        connection.settimeout(HELLO_S)
        stream = connection.makefile("rwb")
        with suppress(OSError, msgspec.MsgspecError):
            greeting = rank_probe.receive(stream, Greeting)
            if hmac.compare_digest(greeting.key.encode(), key.encode()):
                connection.settimeout(rank_probe.DIGEST_S)
                ahead_s = greeting.unix_s - time.time()
                return ProbeConnection(connection, stream, greeting.versions, ahead_s)
        stream.close()
        connection.close()
    return None


def _unreached(host: str, code: int | None, output: IO[bytes], patience_s: float) -> Unreached:
    """Why no probe has connected, by its exit code and output."""
    output.seek(0)
    lines = output.read().decode(errors="replace").strip().splitlines()
    last = printable(lines[-1]) if lines else f"exit code {code}"
    by_ssh = f"`ssh -o BatchMode=yes {host} true` must succeed at once, by a key without a prompt"
    if code is None:
        return Unreached(f"no process has connected within {patience_s:g} s", by_ssh)
    if code == rank_probe.UNREACHED:
        return Unreached(last, NETWORK)
    if code == SSH_FAILED and not ranks.is_here(host):
        return Unreached(f"SSH failed: {last}", by_ssh)
    remedy = (
        f"install mlx-stack there as here: `{sys.executable} -c 'import mlxstack'` must succeed"
    )
    return Unreached(f"a rank does not start there: {last}", remedy)
