"""A tiny real worker: an HTTP server with the health, props and slots of a service.

`python worker.py PRESET_JSON`. The variable WORKER_MODE makes it behave:
ok; slow (never ready); loads (reports progress for six seconds, then serves); deaf (ignores
SIGTERM); dies (at once); hopeless (must not restart, and goes on
talking after its reason); flaps (serves, then dies soon).
After SIGUSR1 it calls itself ill.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from mlxstack.host.parent_watchdog import follow_supervisor

MODE = os.environ.get("WORKER_MODE", "ok")
TOLD = '{{"level":"INFO","source":"loader","message":"reading the weights: {0} GiB of 8 GiB"}}'
LOADING = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
ILL = {"error": {"code": 503, "message": "no turn ends", "type": "unavailable_error"}}
is_ill = asyncio.Event()
is_here = asyncio.Event()


def answer(method: str, target: str, preset: dict) -> tuple[int, object]:
    path, _, query = target.partition("?")
    slots = preset["slots"]
    if MODE == "slow" or is_ill.is_set() or not is_here.is_set():
        return 503, ILL if is_ill.is_set() else LOADING
    if path == "/health":
        return 200, {"status": "ok"}
    if path == "/props":
        return 200, {
            "total_slots": slots["count"],
            "default_generation_settings": {"n_ctx": slots["n_ctx"], "params": {}},
            "model_alias": preset["name"],
        }
    if path == "/slots":
        empty = {"n_ctx": slots["n_ctx"], "speculative": False, "is_processing": False}
        return 200, [{"id": n, **empty} for n in range(slots["count"])]
    if path == "/slots/0" and query == "action=erase":
        return 200, {"id_slot": 0, "n_erased": 7}
    code, message = (409, "slot 1 is busy") if path == "/slots/1" else (404, f"{path}: not here")
    if preset["kind"] == "embedding":
        code = 501
        message = "only vectors here"
    return code, {"error": {"code": code, "message": message, "type": "not_found_error"}}


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    preset = json.loads(Path(sys.argv[1]).read_text())
    say(f"worker says hello from {Path.cwd()}")
    if MODE == "dies":
        say("error: the weights are not there")
        return 3
    if MODE == "hopeless":
        say("error: this model cannot be served")
        for _ in range(50):
            say("[ring] Sending to socket 7 failed with errno 32")
        return 78
    return asyncio.run(run(preset))


async def run(preset: dict) -> int:
    leaving = asyncio.Event()
    loop = asyncio.get_running_loop()
    if MODE == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        loop.add_signal_handler(signal.SIGTERM, leaving.set)
    loop.add_signal_handler(signal.SIGUSR1, is_ill.set)
    follow_supervisor(os.environ)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, target, _ = head.split(" ", 2)
        status, body = answer(method, target, preset)
        content = json.dumps(body).encode()
        writer.write(
            f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\nconnection: close\r\n\r\n".encode()
            + content
        )
        await writer.drain()
        writer.close()

    server = preset["server"]
    await asyncio.start_server(serve, server["host"], server["port"])
    say("listening")
    if MODE == "loads":
        for n in range(8):
            say(TOLD.format(n))
            await asyncio.sleep(0.8)
    is_here.set()
    if MODE == "flaps":
        await asyncio.sleep(0.05)
        return 1
    await leaving.wait()
    say("drained, bye")
    return 0


if __name__ == "__main__":
    sys.exit(main())
