"""Many commands of `mlx-stack`, each in a process forked from one that has imported it.

A command of its own process takes most of a second for imports. `answers` runs this file once;
it reads the commands as JSON from stdin and prints exit code, stdout and stderr of each.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def answers(
    commands: Sequence[Sequence[str]], home: Path, **env: str
) -> "list[subprocess.CompletedProcess[str]]":
    """The ends of these commands, run one after the other with one home."""
    # Without `no_proxy`, the network library of macOS would be called in a forked process.
    variables = {"PATH": "/usr/bin:/bin", "MLX_STACK_HOME": str(home), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.cli.forked"],
        input=json.dumps([list(words) for words in commands]),
        env=variables | {"no_proxy": "*"} | env,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    ends = json.loads(done.stdout)
    return [
        subprocess.CompletedProcess(words, *end) for words, end in zip(commands, ends, strict=True)
    ]


def _answer(words: Sequence[str]) -> tuple[int, str, str]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = os.fork()
        if not process:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            _run(words)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return code, texts[0], texts[1]


def _run(words: Sequence[str]) -> None:
    """Run one command as the installed program does; does not return."""
    from mlxstack.cli.main import main

    sys.argv = ["mlx-stack", *words]
    code: object = 1
    try:
        main()
    except SystemExit as end:
        code = end.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0)


def _preload() -> Mapping[str, object]:
    import httpx
    import huggingface_hub
    import yaml

    import mlxstack.cli.main
    import mlxstack.host.presets

    return vars(mlxstack.cli.main) | vars(httpx) | vars(huggingface_hub) | vars(yaml)


if __name__ == "__main__":
    assert _preload()
    print(json.dumps([_answer(words) for words in json.load(sys.stdin)]))  # noqa: T201
