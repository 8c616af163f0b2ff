"""Every template's own answers are read back; those that it does not tell apart are left out."""

from pathlib import Path
from typing import Any

import pytest

from tests.features.formats.formats import FORMATS, made_tokenizer
from tests.features.formats.invented import INVENTED, NESTED
from tests.features.formats.siblings import SIBLINGS
from tests.features.formats.written import ANSWERS, measured
from tests.text.test_published_templates import EACH, tokenizer_of

OWN = {**FORMATS, **INVENTED, **NESTED, **SIBLINGS}
# No model of these formats writes ids, messages or nested text as these templates do.
NAMES = [name for name in OWN if name not in ("section", "channels", "quoted")]


@pytest.fixture(params=[*NAMES, *EACH], ids=lambda one: getattr(one, "stem", one))
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    is_own = isinstance(request.param, str)
    return made_tokenizer(OWN[request.param]) if is_own else tokenizer_of(request.param, tmp_path)


def test_all_that_a_template_writes_is_read(tokenizer: Any) -> None:
    misread, _, n_written, _ = measured(tokenizer)
    assert misread == []
    assert n_written >= len(ANSWERS) - 5
