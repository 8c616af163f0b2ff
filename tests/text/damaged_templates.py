"""Damages of a ChatML template; `python -m tests.text.damaged_templates FOLDER` names them.

They are made by patterns that a template of this family has, published ones too.
"""

import re
import sys
from pathlib import Path
from typing import Any

from msgspec import Struct

from mlxstack.engine.loading.tokenizer_folder import load_tokenizer
from mlxstack.text.assembly import template_tool_losses
from mlxstack.text.template.tool_losses import LostPart

CALLS = r"in ((?:m|message)\.tool_calls)(?: or \[\])?"
TOOL = r"tool \| tojson"
ARGUMENTS = r"tool_call\.arguments \| tojson"


class Damage(Struct, frozen=True):
    """What a damage loses, and its replacement in a template."""

    lost: LostPart
    pattern: str
    replacement: str
    after: str = ""
    """Pattern behind which alone it is made."""

    def of(self, template: str) -> str:
        """Damaged template."""
        start = re.search(self.after, template)
        assert start is not None
        head = template[: start.end()]
        tail = template[start.end() :]
        damaged = re.sub(self.pattern, lambda match: match.expand(self.replacement), tail)
        if self.after:
            damaged = re.sub(self.pattern, self.replacement, tail, count=1)
        assert damaged != tail, f"no {self.pattern} in the template"
        return head + damaged


DAMAGES = (
    Damage(LostPart.TOOLS, TOOL, "'a tool'"),
    Damage(LostPart.PARAMETERS, TOOL, "tool.function.name + tool.function.description"),
    Damage(LostPart.SYSTEM, r"messages\[0\](?:\.|\[')content(?:'\])?", "''", after=r"if tools"),
    Damage(LostPart.CALLS, CALLS, "in []"),
    Damage(LostPart.ARGUMENTS, ARGUMENTS, "{} | tojson"),
    Damage(LostPart.OBJECTS, ARGUMENTS, "tool_call.arguments | tojson | tojson"),
    Damage(LostPart.PARALLEL, CALLS, r"in (\1 or [])[:1]"),
    Damage(LostPart.RESULTS, r"(?:m|message)\.content", "''", after=r"role == [\"']tool[\"']"),
    Damage(LostPart.ORDER, r"for (m|message) in messages", r"for \1 in messages | reverse"),
    Damage(LostPart.ROLES, r"'<\|im_start\|>' \+ (?:m|message)\.role", "'<|im_start|>assistant'"),
    Damage(LostPart.ENDS, r"<\|im_end\|>", ""),
    Damage(LostPart.OPENING, r"if add_generation_prompt", "if false"),
)


def losses(tokenizer: Any, template: str) -> tuple[LostPart, ...]:
    """Losses of a tokenizer with this template."""
    kept = tokenizer.chat_template
    tokenizer.chat_template = template
    try:
        return template_tool_losses(tokenizer)[0]
    finally:
        tokenizer.chat_template = kept


def main(folder: Path) -> None:
    """Print what is found for a model's template, whole and damaged."""
    tokenizer = load_tokenizer(folder)
    whole = tokenizer.chat_template
    lines = [f"whole: {', '.join(losses(tokenizer, whole)) or 'nothing is lost'}"]
    n_named = 0
    for damage in DAMAGES:
        lost = losses(tokenizer, damage.of(whole))
        n_named += damage.lost in lost
        lines.append(f"{damage.lost.name.lower()}: {', '.join(lost)}")
    lines.append(f"{n_named} of {len(DAMAGES)} damages are named")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
