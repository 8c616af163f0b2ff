"""Requests in the shape in which Codex sends them; their words are ours."""

from typing import Any

THREAD = "0190a0a0-0000-7000-8000-000000000001"
HEADERS = {
    "session-id": THREAD,
    "thread-id": THREAD,
    "x-codex-window-id": f"{THREAD}:0",
    "originator": "codex_exec",
    "accept": "text/event-stream",
}


def said(role: str, *texts: str) -> dict[str, Any]:
    """A message item."""
    kind = "output_text" if role == "assistant" else "input_text"
    content = [{"type": kind, "text": text} for text in texts]
    return {"type": "message", "id": f"msg_{role}", "role": role, "content": content}


def function(name: str, **properties: Any) -> dict[str, Any]:
    """A function tool."""
    return {
        "type": "function",
        "name": name,
        "description": f"Does {name}",
        "strict": False,
        "parameters": {"type": "object", "properties": properties, "additionalProperties": False},
    }


TEXT = {"type": "string"}
TOOLS: list[dict[str, Any]] = [
    function("exec_command", cmd=TEXT),
    function("write_stdin", chars=TEXT),
    {
        "type": "namespace",
        "name": "multi_agent_v1",
        "description": "Other agents",
        "tools": [function("spawn_agent", message=TEXT), function("close_agent", target=TEXT)],
    },
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: begin hunk+ end"},
    },
    {"type": "web_search", "external_web_access": True},
]
START: list[dict[str, Any]] = [
    said("developer", "You are a coding agent."),
    said("developer", "Skills come here.", "Permissions come here."),
    said("user", "The folder is empty."),
    said("user", "run the marker command"),
]
LOOP: list[dict[str, Any]] = [
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAB-foreign"},
    {**said("assistant", "I run it."), "status": "completed"},
    {
        "type": "function_call",
        "id": "fc_1",
        "status": "completed",
        "name": "exec_command",
        "arguments": '{"cmd": "echo MARKER"}',
        "call_id": "call_1",
    },
    {"type": "function_call_output", "call_id": "call_1", "output": "exit code 0\nMARKER"},
]


def request(*items: dict[str, Any]) -> dict[str, Any]:
    """A whole body that ends with these items."""
    return {
        "model": "local-model",
        "stream": True,
        "input": [*START, *items],
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": THREAD,
        "client_metadata": {"session_id": THREAD, "turn_id": THREAD},
    }
