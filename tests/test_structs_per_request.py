"""Structs that one streamed chat makes: on the request's way in, and for each token.

A value that is wrapped once is read once. The limits only ever fall.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.structs_per_request import N_TOKENS

ROOT = Path(__file__).parents[1]

pytestmark = [pytest.mark.mlx, pytest.mark.net]

MOST_STRUCTS_OF_A_REQUEST = 24
MOST_STRUCTS_OF_A_TOKEN = 8

STATE = {
    "AssignSlot",
    "CacheMiss",
    "ApiKey",
    "Counters",
    "MissContext",
    "MissSums",
    "MissView",
    "RestorePoint",
    "ReusePlan",
    "ReuseSource",
    "PrefixMatch",
    "RequestTimings",
    "RequestView",
    "SchedulerState",
    "Slot",
    "SlotTokens",
    "SlotView",
    "Snapshot",
    "ThroughputModel",
    "WidthCosts",
}
"""Structs of the engine's state and of what it measured, which hold no request and no token."""


def test_a_chat_makes_few_structs() -> None:
    # `-c`, so that it is no fork of a process that has made the structs already.
    program = "from tests.structs_per_request import main; main()"
    command = [sys.executable, "-c", program]
    made = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT).stdout)
    per_token = {name for name, n in made["after"].items() if n >= N_TOKENS - 2} - STATE
    per_request = set(made["before"]) - per_token - STATE
    assert {"ChatBody", "Request"} <= per_request
    assert {"TokenSampled", "Chunk"} <= per_token
    assert len(per_request) <= MOST_STRUCTS_OF_A_REQUEST, sorted(per_request)
    assert len(per_token) <= MOST_STRUCTS_OF_A_TOKEN, sorted(per_token)
