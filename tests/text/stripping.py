"""Templates that write fewer thoughts once the user speaks again, each in its own way."""

from tests.text.conftest import CHATML

# Thoughts stay until the next user message, as in Qwen3 and GLM-4.
LOOP = CHATML
# No thought is ever written back; the sampled answers are replayed until the user speaks.
NEVER = CHATML.replace("m.reasoning_content and loop.index0 > ns.last", "false")
# Only the thought of the last answer is written; results have a role of their own.
LATEST = CHATML.replace(
    "loop.index0 > ns.last", "loop.index0 > ns.last and loop.index0 >= loop.length - 2"
).replace(
    "'<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n'",
    "'<|im_start|>tool\\n' + m.content + '<|im_end|>\\n'",
)
# Only thoughts before calls are written, until the user speaks, as in DeepSeek V3.2.
CALLS = CHATML.replace("m.reasoning_content and", "m.reasoning_content and m.tool_calls and")
STRIPPING = {"loop": LOOP, "never": NEVER, "latest": LATEST, "calls": CALLS}
assert len(set(STRIPPING.values())) == len(STRIPPING), "a replacement found nothing"
