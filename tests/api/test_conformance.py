"""Our own description of the doors, tried with seeded random requests against a real service."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.config import GenerationConfig, ProjectConfig, ProjectsConfig, SchemathesisConfig
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from mlxstack.core.preset import SamplingSpec, SlotSpec
from tests.api.running import running, tiny_preset
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.mlx, pytest.mark.net, pytest.mark.slow]

SEED = 20261120
# A feature that is off answers 501, as llama-server has it.
OFF = 501


def plan() -> SchemathesisConfig:
    """Valid and invalid requests, the same ones every time."""
    generation = GenerationConfig(
        modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE], deterministic=True
    )
    project = ProjectConfig(generation=generation)
    return SchemathesisConfig(seed=SEED, projects=ProjectsConfig(default=project))


@pytest.fixture(scope="module")
def doors(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    preset = tiny_preset(
        model_folder, slots=SlotSpec(count=3, n_ctx=128), sampling=SamplingSpec(max_tokens=4)
    )
    with running(preset, tmp_path_factory.mktemp("home")) as live:
        yield schemathesis.openapi.from_url(f"{live.url}/schema/openapi.json", config=plan())


@pytest.fixture(scope="module")
def client() -> Iterator[requests.Session]:
    """One for all requests: it keeps its connection, and looks for no proxy before each of them."""
    with requests.Session() as session:
        session.trust_env = False
        session.headers.clear()
        yield session


# Left out are second names of the same routes, and the feed, which never ends.
schema = schemathesis.pytest.from_fixture("doors").exclude(
    path_regex=r"^/(events|chat/|responses|models|embeddings|completions|v1/health|v1/batch/)"
)


# They take most of the time, with the parts of the bodies that others have too.
SAME_BODIES = (
    r"^/(apply-template|tokenize|v1/responses$|v1/chat/completions/input_tokens|api/v0/chat/completions"
    r"|v1/completions|v1/messages/count_tokens|v1/agents/[^/]+/generate|api/generate|cache/warm)"
)
as_always = settings(
    max_examples=2,
    database=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@schema.exclude(path_regex=SAME_BODIES).parametrize()
@seed(SEED)
@as_always
def test_answers_are_as_described(case: schemathesis.Case, client: requests.Session) -> None:
    check(case, client)


@schema.include(path_regex=SAME_BODIES).parametrize()
@seed(SEED)
@settings(as_always, max_examples=4, phases=[Phase.generate])
def test_answers_to_bodies_that_others_take_too_are_as_described(
    case: schemathesis.Case, client: requests.Session
) -> None:
    check(case, client)


@pytest.mark.soak
@schema.parametrize()
@seed(SEED)
@as_always
def test_every_answer_is_as_described(case: schemathesis.Case, client: requests.Session) -> None:
    check(case, client)


def check(case: schemathesis.Case, client: requests.Session) -> None:
    """Never a 5xx; content types and bodies as OpenAPI tells them."""
    response = case.call(session=client, timeout=PATIENCE_S)
    checks = [content_type_conformance, response_schema_conformance]
    if response.status_code != OFF:
        checks.append(not_a_server_error)
    case.validate_response(response, checks=checks)
