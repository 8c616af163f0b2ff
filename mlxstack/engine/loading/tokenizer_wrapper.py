"""mlx-lm's wrapper of a tokenizer, without its detokenizers."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlx_lm import tokenizer_utils
from mlx_lm import utils as mlx_utils

DETOKENIZERS = (
    "NaiveStreamingDetokenizer", "SPMStreamingDetokenizer", "BPEStreamingDetokenizer",
)  # fmt: skip
_LOCK = threading.Lock()


class UnusedDetokenizer:
    """Stands for a detokenizer of mlx-lm.

    Those have tables of as many ids as there are tokens: a hole in the ids fails already when the
    tokenizer is loaded. `TokenDecoder` makes the text of answers.
    """

    def __init__(self, tokenizer: Any, trim_space: bool = True) -> None:
        """Take what the others take."""


def load_wrapper(folder: Path, settings: dict[str, Any]) -> Any:
    """mlx-lm's TokenizerWrapper of a folder, with settings of tokenizer_config.json."""
    with _LOCK, _unused_detokenizers():
        return mlx_utils.load_tokenizer(folder, settings)


@contextmanager
def _unused_detokenizers() -> Iterator[None]:
    kinds = {name: getattr(tokenizer_utils, name) for name in DETOKENIZERS}
    try:
        for name in kinds:
            setattr(tokenizer_utils, name, UnusedDetokenizer)
        yield
    finally:
        for name, kind in kinds.items():
            setattr(tokenizer_utils, name, kind)
