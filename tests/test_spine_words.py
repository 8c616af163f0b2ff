"""The spine names no feature: a feature is registered by the assemblies alone.

A line of code or of a docstring that holds a word of a feature is listed here, with the reason.
"""

import re
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "mlxstack"

FEATURE_OF = {
    "draft": "drafts", "drafts": "drafts", "drafted": "drafts", "drafter": "drafts",
    "drafting": "drafts",
    "mtp": "drafts", "speculation": "drafts", "speculative": "drafts",
    "image": "vision", "images": "vision", "vision": "vision", "tower": "vision",
    "pixel": "vision", "pixels": "vision",
    "early": "early turns",
    "remote": "remote KV", "peer": "remote KV", "peers": "remote KV", "exchange": "remote KV",
    "rank": "ranks", "ranks": "ranks", "mirror": "ranks", "mirrored": "ranks",
    "mirrors": "ranks", "distributed": "ranks", "machines": "ranks",
    "stack": "row stacks", "stacks": "row stacks", "stacked": "row stacks",
    "stacker": "row stacks", "unstack": "row stacks",
    "replay": "replay", "replayed": "replay",
    "loops": "loops",
    "sibling": "siblings", "siblings": "siblings",
}  # fmt: skip
"""The feature that owns a word."""

DECODING = (
    "attention_patch", "batch", "batch_row", "prefill", "proposer", "row_grouper", "sampler",
)  # fmt: skip
SPINE = (
    "engine/thread.py", "engine/loop.py", "engine/slots/*.py", "engine/kv/*.py",
    "engine/model/runner.py", "engine/model/token_inputs.py",
    *(f"engine/decode/{name}.py" for name in DECODING),
    "text/prompt/*.py", "text/template/*.py", "text/tokens/*.py", "text/rendering/*.py",
    "service/service.py", "service/calls/admission.py", "service/calls/generation.py",
    "api/run_generation.py", "api/streaming.py",
)  # fmt: skip

FEATURE_FILES = {
    "features/remote_kv/kv_export.py": "remote KV: only the assembly imports it",
    "features/remote_kv/remote_prefill.py": "remote KV: only the assembly imports it",
    "features/replay/answer_replay.py": "replay: only `replay.py` imports it",
    "features/replay/replay.py": "replay: only the assembly imports it",
    "features/replay/splices.py": "replay: only `replay.py` imports it",
}

SPANS = "tokens of an image are cut, compared and stored as a whole, by values of core"
EXCEPTIONS: dict[str, dict[str, tuple[int, str]]] = {
    "api/run_generation.py": {
        "early turns": (1, "an option of routes, which answer before the model is loaded")
    },
    "engine/kv/disk_tier.py": {"vision": (1, SPANS)},
    "engine/kv/prefix_cache.py": {"vision": (2, SPANS)},
    "engine/kv/slot_context.py": {"vision": (11, SPANS)},
    "engine/model/token_inputs.py": {"vision": (2, "the refusal of ids that have no row")},
    "engine/slots/prefix_lookup.py": {"vision": (7, SPANS)},
    "engine/slots/request_state.py": {
        "drafts": (1, "a field of public timings"),
        "vision": (1, "a field of public timings"),
        "loops": (1, "a field of public timings"),
    },
    "engine/slots/answer_rule.py": {"loops": (1, "values of public timings")},
    "service/calls/admission.py": {"loops": (1, "a field of requests")},
    "text/prompt/prompt.py": {"vision": (1, SPANS)},
    "text/tokens/cached_tokenizer.py": {
        "replay": (1, "a field of public timings"),
        "vision": (11, SPANS),
    },
}
"""Lines with a word of a feature, by file and feature: how many, and why."""

OTHER_NAMES = re.compile(r"StackError|ExitStack|mlxstack|mlx-stack|to_stack_error|mx\.stack")
"""Names with a word of a feature in another meaning."""

WORD = re.compile(r"[A-Za-z][a-z]*|[A-Z]+(?![a-z])")


def spine_files() -> list[str]:
    paths = (path for pattern in SPINE for path in PACKAGE.glob(pattern))
    names = (path.relative_to(PACKAGE).as_posix() for path in paths)
    return sorted(set(names) - FEATURE_FILES.keys())


def lines_of_features(text: str) -> Counter[str]:
    """Number of lines that hold a word of a feature, by feature."""
    counts: Counter[str] = Counter()
    for line in text.splitlines():
        words = {word.lower() for word in WORD.findall(OTHER_NAMES.sub("", line))}
        counts.update({FEATURE_OF[word] for word in words & FEATURE_OF.keys()})
    return counts


@pytest.mark.parametrize("file", spine_files())
def test_a_file_of_the_spine_names_no_feature(file: str) -> None:
    counts = lines_of_features((PACKAGE / file).read_text())
    allowed = {feature: n for feature, (n, _) in EXCEPTIONS.get(file, {}).items()}
    assert counts == allowed


def test_every_exception_is_of_a_file_of_the_spine() -> None:
    assert EXCEPTIONS.keys() <= set(spine_files())


def test_words_are_found_in_names_and_texts() -> None:
    text = "n_early_turns = 1\nclass DraftModel:\nURLImages\nearlyish = 'a remote, an image'"
    assert lines_of_features(text) == {
        "early turns": 1, "drafts": 1, "vision": 2, "remote KV": 1,
    }  # fmt: skip
