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

MAX_STRUCTS_OF_A_REQUEST = 11
MAX_STRUCTS_OF_A_TOKEN = 7

STATE = {
    "AgentSettings",
    "AgentTitle",
    "AssignSlot",
    "BlockHashes",
    "CacheMiss",
    "ApiKey",
    "ContextFacts",
    "Counters",
    "KnownConversation",
    "Lookup",
    "LastPrompt",
    "MissContext",
    "MissSums",
    "MissView",
    "PrefillChunk",
    "PreparedChunk",
    "PromptLogits",
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
    "TemplateThinking",
    "ThinkingBound",
    "ThinkingDecision",
    "ThinkingLayer",
    "ThroughputModel",
    "UsageEntry",
    "UsageSums",
    "WidthCosts",
}
"""Structs of state, of decisions about it, and of what was measured; they pass no request on.

They stay when the request has ended: titles of agents, names of conversations, last prompts and
their block hashes, and logits of a slot for the same prompt again. Or they change the state:
the slot that is assigned, the source of reused KV, the number of tokens to compute in a slot.
"""

EVENTS = {"SlotAssigned", "PrefillProgress"}
"""Events before the first token, on their way from the engine to the client."""


def test_a_chat_makes_few_structs() -> None:
    # `-c`, so that it is no fork of a process that has made the structs already.
    program = "from tests.structs_per_request import main; main()"
    command = [sys.executable, "-c", program]
    made = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT).stdout)
    per_token = {name for name, n in made["after"].items() if n >= N_TOKENS - 2} - STATE
    per_request = set(made["before"]) - per_token - STATE - EVENTS
    assert {"AnyChatBody", "Request"} <= per_request
    assert {"TokenSampled", "Chunk"} <= per_token
    assert len(per_request) <= MAX_STRUCTS_OF_A_REQUEST, sorted(per_request)
    assert len(per_token) <= MAX_STRUCTS_OF_A_TOKEN, sorted(per_token)
