"""The embedded demo model: where its files are."""

from pathlib import Path

MODEL_DIR: Path = Path(__file__).parent / "model"
