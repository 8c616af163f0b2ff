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
        ('{"temperature": 1, "top_k": 20.0}', SamplingDefaults(temperature=1.0, top_k=20)),
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


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("min_p", "1.5"), ("min_p", '"0.1"'), ("temperature", "-1"), ("temperature", "NaN"),
        ("temperature", "1e400"), ("temperature", "1e300"), ("top_p", "0"), ("top_p", "7"),
        ("top_k", "-5"), ("top_k", "2.5"), ("top_k", "1e30"), ("top_k", "[20]"), ("top_k", "true"),
        ("repetition_penalty", "0"), ("repetition_penalty", '{"a": 1}'),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_left_out_by_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, text: str
) -> None:
    beside = "top_p" if name != "top_p" else "min_p"
    (tmp_path / FILE).write_text(f'{{"{name}": {text}, "{beside}": 0.5}}')
    usable = SamplingDefaults(top_p=0.5) if beside == "top_p" else SamplingDefaults(min_p=0.5)
    assert sampling_defaults(tmp_path) == usable
    assert f"{FILE}: {name} cannot be" in caplog.text
