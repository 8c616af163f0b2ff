"""Every rule of the wire has a test that bears its id, or a line among the decisions."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
ROOMS = ("api", "clients", "engine", "service", "text")
COUNTS = {"x": (*range(1, 12), 20, 21, 22, 23, 30, 31), "c": range(1, 11), "o": range(1, 11)}
ANTHROPIC = (1, 2, 3, *range(10, 16), *range(20, 25), *range(30, 36))
FEATURES = tuple(f"b{n}" for n in range(1, 20))
IDS = (
    *(f"{letter}{n}" for letter, numbers in COUNTS.items() for n in numbers),
    *(f"a{n}" for n in ANTHROPIC),
    *(f"a{n}u" for n in range(20, 24)),
    *(f"r{n}" for n in range(1, 5)),
    *FEATURES,
)


def test_every_rule_has_a_test_or_a_reason() -> None:
    rules: set[str] = set()
    for room in ROOMS:
        for file in (TESTS / room).rglob("test_*.py"):
            for name in re.findall(r"def test_(\w+)", file.read_text()):
                rules.update(re.sub(r"\b([a-z])_(\d)", r"\1\2", name.replace("__", "_")).split("_"))
                rules.update(f"{a}{b}" for a, b in re.findall(r"(?:^|_)([a-z])_(\d+u?)", name))
    decisions = TESTS.parent / "docs" / "decisions"
    reasons = "\n".join(file.read_text() for file in decisions.glob("*.md")).lower()
    missing = [i for i in IDS if i not in rules and f"{i[0]}-{i[1:]}" not in reasons]
    assert missing == []
