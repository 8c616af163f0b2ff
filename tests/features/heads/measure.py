"""First token of a client's first message, cold and after a restart with its head.

python -m tests.features.heads.measure MODEL CAPTURE: a folder with a model, and a file with the
recorded requests of Claude Code.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from mlxstack.core.preset import ModelSpec, Preset, SamplingSpec, ServerSpec, SlotSpec
from mlxstack.features.heads.service import ClientHeads
from tests.api.running import Running, running
from tests.clients.tapes import recorded
from tests.patience import PATIENCE_S

N_CTX = 32768
N_ANSWER = 400
"""Tokens of an answer at most: an answer that is cut leaves no head."""
WAIT_S = 0.2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("capture", type=Path)
    options = parser.parse_args()
    preset = Preset(
        model=ModelSpec(id=str(options.model), alias="local-model"),
        slots=SlotSpec(count=2, n_ctx=N_CTX),
        sampling=SamplingSpec(temperature=0),
        server=ServerSpec(port=0),
    )
    body = next(
        request.body
        for request in recorded(options.capture).requests
        if request.path.startswith("/v1/messages?") and request.body.get("tools")
    )
    home = Path(tempfile.mkdtemp())
    with running(preset, home) as live:
        cold = first_token(live, body, "one")
    with running(preset, home) as live:
        began = time.monotonic()
        httpx.post(f"{live.url}/heads", json={"client": "claude"}).raise_for_status()
        while not is_ready(live):
            time.sleep(WAIT_S)
        ready_s = time.monotonic() - began
        warm = first_token(live, body, "two")
    share = warm["ttft_s"] / cold["ttft_s"]
    sys.stdout.write(
        json.dumps({"cold": cold, "ready_s": ready_s, "warm": warm, "share": share}, indent=2)
        + "\n"
    )


def first_token(live: Running, body: dict[str, Any], session: str) -> dict[str, Any]:
    """Figures of the request as `/requests` has them."""
    messages = [*body["messages"], {"role": "user", "content": f"Say hello to session {session}."}]
    headers = {"x-claude-code-session-id": session, "user-agent": "claude-cli/2.1.329"}
    data = {**body, "messages": messages, "stream": False, "max_tokens": N_ANSWER}
    httpx.post(
        f"{live.url}/v1/messages", json=data, headers=headers, timeout=PATIENCE_S
    ).raise_for_status()
    view = httpx.get(f"{live.url}/requests").json()[0]
    return {name: view[name] for name in ("n_prompt", "n_cached", "ttft_s", "source")}


def is_ready(live: Running) -> bool:
    """Whether the head is computed."""
    feature = live.service.feature(ClientHeads)
    assert feature is not None
    return any(view.state == "ready" for view in feature.views)


if __name__ == "__main__":
    main()
