"""The sampling that a model's generation_config.json recommends."""

from pathlib import Path

import pytest

from mlxstack.core.model_info import SamplingDefaults
from mlxstack.models.generation_config import FILE, sampling_defaults


@pytest.mark.parametrize(
    "text, found",
    [
        ('{"bos_token_id": 1, "eos_token_id": 2}', SamplingDefaults()),
        ('{"temperature": 0.6, "top_k": 20}', SamplingDefaults(temperature=0.6, top_k=20)),
        ('{"do_sample": false, "temperature": 0.6}', SamplingDefaults(temperature=0.0)),
        ('{"do_sample": true}', SamplingDefaults()),
        ('{"temperature": "hot", "top_p": null, "top_k": true}', SamplingDefaults()),
        ("[1]", SamplingDefaults()),
        ("{", SamplingDefaults()),
        (None, SamplingDefaults()),
    ],
)
def test_only_numbers_of_a_readable_file_count(
    tmp_path: Path, text: str | None, found: SamplingDefaults
) -> None:
    if text is not None:
        (tmp_path / FILE).write_text(text)
    assert sampling_defaults(tmp_path) == found
