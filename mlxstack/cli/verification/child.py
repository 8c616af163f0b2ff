"""Child processes of a verification, with their lines as they come."""

import os
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from msgspec import Struct

from mlxstack.cli.verification.probe import Say
from mlxstack.host.parent_watchdog import VARIABLE

N_KEPT = 20
"""Last lines of a child's error output that are kept."""
GRACE_S = 5.0
"""Seconds for a child to end by itself, after this process or after Ctrl-C."""


class ChildEnd(Struct, frozen=True):
    """Exit code, negative for a signal, and last lines of errors."""

    exit_code: int
    last_lines: tuple[str, ...]


def run_child(
    command: Sequence[str],
    env: Mapping[str, str],
    limit_s: float,
    say: Say,
    on_line: Callable[[bytes], None],
    question: bytes = b"",
) -> ChildEnd:
    """Run a child that ends with this process.

    `question` is the first line of its input. `say` gets the lines of its error output, `on_line`
    those of its output. After `limit_s` seconds it is killed.
    """
    last_lines: deque[str] = deque(maxlen=N_KEPT)
    with _started(command, {**env, VARIABLE: str(GRACE_S)}, limit_s) as child:
        assert child.stdin and child.stdout and child.stderr
        errors = threading.Thread(target=_pass_on, args=(child.stderr, last_lines, say))
        errors.start()
        with suppress(BrokenPipeError):
            os.write(child.stdin.fileno(), question + b"\n")
        for line in child.stdout:
            on_line(line)
        child.wait()
        errors.join()
    return ChildEnd(child.returncode, tuple(last_lines))


@contextmanager
def _started(
    command: Sequence[str], env: Mapping[str, str], limit_s: float
) -> "Iterator[subprocess.Popen[bytes]]":
    """Child that is gone at the end, or with its input."""
    with subprocess.Popen(
        command,
        env=dict(env),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as child:
        timer = threading.Timer(limit_s, child.kill)
        timer.start()
        try:
            yield child
        except BaseException:
            # Ctrl-C went to the child, too.
            with suppress(subprocess.TimeoutExpired):
                child.wait(GRACE_S)
            child.kill()
            raise
        finally:
            timer.cancel()


def _pass_on(errors: Iterator[bytes], last_lines: deque[str], say: Say) -> None:
    for line in errors:
        text = line.decode(errors="replace").rstrip()
        last_lines.append(text)
        say(text)
