"""Checkpoint writes: their bytes are bounded by those of the session, and no state is far away."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from mlxstack.policy.kv.checkpoint_writes import NEAR, SHARE, CheckpointSize, WrittenContext, due

MAX_CHECKPOINTS = 8
HEAD = 300


class Session:
    """Context of one agent, with what of it is on disk; a token is a byte of KV."""

    def __init__(self, state_bytes: int) -> None:
        self.state_bytes = state_bytes
        self.n_tokens = self.n_prompt = 0
        self.live: list[int] = []
        self.written: list[int] = []
        self.n_kv_written = 0
        """Tokens whose KV is on disk."""
        self.n_leaves = 0

    def answer(self, n_new: int, n_answer: int) -> None:
        """A prompt that adds tokens, with the checkpoints of its prefill, and an answer."""
        head = [] if self.live else [HEAD]
        self.n_tokens = max(self.n_tokens, HEAD)
        self.n_prompt = self.n_tokens + n_new
        self.n_tokens = self.n_prompt + n_answer
        ends = {*head, self.n_prompt - 4, self.n_prompt - 1, self.n_tokens}
        self.live = sorted({*self.live, *ends})
        self.live = [*self.live[:1], *self.live[1:][1 - MAX_CHECKPOINTS :]]
        self.write(is_leaving=False)

    def leave(self) -> None:
        """The context leaves its slot, as at a stop."""
        if self.n_tokens:
            self.n_leaves += 1
            self.write(is_leaving=True)

    def crash(self) -> int:
        """Start again with what is on disk; the tokens to compute again."""
        n_before = self.n_tokens
        self.n_tokens = self.n_prompt = max(self.written, default=0)
        self.live = self.written[-1:]
        return n_before - self.n_tokens

    def write(self, *, is_leaving: bool) -> None:
        sizes = tuple(CheckpointSize(position, self.state_bytes) for position in self.live)
        context = WrittenContext(sizes, frozenset(self.written), 1.0, self.n_prompt)
        self.written = sorted({*self.written, *due(context, is_leaving=is_leaving)})
        self.n_kv_written = max(self.n_kv_written, self.n_tokens)


class Turn(Struct, frozen=True):
    """A turn of `n_new` tokens of a prompt and `n_answer` of its answer."""

    n_new: int
    n_answer: int


turns = st.builds(Turn, st.integers(5, 4000), st.integers(1, 2000))
events = st.lists(st.one_of(turns, turns, turns, st.sampled_from(["leave", "crash"])), max_size=60)


def played(state_bytes: int, happened: list[Turn | str]) -> Session:
    session = Session(state_bytes)
    for event in happened:
        if isinstance(event, Turn):
            session.answer(event.n_new, event.n_answer)
        elif event == "leave":
            session.leave()
        else:
            session.crash()
    return session


@given(st.integers(1, 20_000), events)
def test_checkpoints_add_a_share_of_the_session_and_some_at_each_leave(
    state_bytes: int, happened: list[Turn | str]
) -> None:
    session = played(state_bytes, happened)
    n_bounded = SHARE * session.n_kv_written + (1 + 2 * session.n_leaves) * state_bytes
    assert len(session.written) * state_bytes <= n_bounded


@given(st.integers(1, 20_000), events, turns)
def test_a_crash_loses_as_much_kv_as_a_checkpoint_is_worth_and_its_last_turn(
    state_bytes: int, happened: list[Turn | str], last: Turn
) -> None:
    session = played(state_bytes, happened)
    session.answer(last.n_new, last.n_answer)
    assert session.crash() < state_bytes / SHARE + NEAR + last.n_answer


@given(st.integers(1, 20_000), events)
def test_a_context_that_has_left_is_resumed_at_its_end(
    state_bytes: int, happened: list[Turn | str]
) -> None:
    session = played(state_bytes, happened)
    session.leave()
    before = list(session.written)
    session.leave()
    assert session.crash() == 0
    assert session.written == before


@given(st.integers(1, 20_000), turns)
def test_a_first_turn_leaves_what_other_conversations_share(state_bytes: int, first: Turn) -> None:
    assert played(state_bytes, [first]).written[0] == HEAD
