"""Work and reuse from turn to turn, for every template: letters that are tokenized, tokens kept."""

from pathlib import Path
from typing import Any

import pytest

from mlxstack.core.conversation import Conversation, Message, Role, ToolCall
from mlxstack.text.assembly import assemble_text, template_report
from mlxstack.text.prompt.report import READ
from tests.features.formats.formats import FORMATS, made_tokenizer
from tests.features.formats.invented import INVENTED, NESTED
from tests.features.formats.siblings import SIBLINGS
from tests.text.test_published_templates import EACH, tokenizer_of

OWN = {**FORMATS, **INVENTED, **NESTED, **SIBLINGS}
N_TURNS = 12
RESULT = "def main():\n    return 1\n" * 20
MAX_MORE = 600
"""Letters of marks, names and ids around a turn, and of the turn that another one ends."""


class Counted:
    """A tokenizer that counts the letters it encodes."""

    def __init__(self, tokenizer: Any) -> None:
        self.n_letters = 0
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    @property
    def backend_tokenizer(self) -> "CountedBackend":
        return CountedBackend(self, self._backend)

    def encode(self, text: str, **options: Any) -> Any:
        self.n_letters += len(text)
        return self._tokenizer.encode(text, **options)


class CountedBackend:
    """The same for the batches of its backend."""

    def __init__(self, counted: Counted, backend: Any) -> None:
        self._counted = counted
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode_batch(self, texts: list[str], **options: Any) -> Any:
        self._counted.n_letters += sum(map(len, texts))
        return self._backend.encode_batch(texts, **options)


@pytest.fixture(params=[*OWN, *EACH], ids=lambda one: getattr(one, "stem", one))
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    is_own = isinstance(request.param, str)
    return made_tokenizer(OWN[request.param]) if is_own else tokenizer_of(request.param, tmp_path)


def test_a_turn_costs_what_is_new_in_it(tokenizer: Any) -> None:
    """Letters that a turn of a tool loop tokenizes: its own, however long the conversation is."""
    counted = Counted(tokenizer)
    prompt_maker = assemble_text(counted).prompt_maker
    marks = [one.content for one in tokenizer.added_tokens_decoder.values()]
    turns = [Message(Role.USER, "Fix it.")]
    costs = list[int]()
    for at in range(N_TURNS):
        before = counted.n_letters
        prompt_maker.make(Conversation(tuple(turns), (READ,)))
        costs.append(counted.n_letters - before)
        call = ToolCall(f"call{at:05}", READ.name, {"path": f"src/a{at}.py"})
        turns.append(Message(Role.ASSISTANT, "", tool_calls=(call,)))
        turns.append(Message(Role.TOOL, f"{at}\n{RESULT}", tool_call_id=call.id))
    text = prompt_maker.text(Conversation(tuple(turns), (READ,)))
    if sum(map(text.count, marks)) < N_TURNS:
        pytest.skip("the template makes the names of its marks, which this tokenizer lacks")
    new = len(RESULT) + MAX_MORE
    assert max(costs[2:]) <= 2 * new < N_TURNS * len(RESULT), costs
    assert max(costs[-3:]) <= max(costs[2:5]) + MAX_MORE, costs


@pytest.mark.parametrize("name", [name for name in OWN if name != "quoted"])
def test_a_tool_loop_keeps_its_tokens(name: str) -> None:
    """The family of the form that is left out has thoughts, and this template none."""
    tokenizer = made_tokenizer(OWN[name])
    assert (template_report(tokenizer).reuse["tool loop"] or 0) >= 0.99
