"""Drafts from answers of the day before, replayed without a model.

`python -m tests.features.drafts.second_day TOKENIZER FIRST SECOND`, where FIRST and SECOND are days
such as 2026-11-27. Commits of this repository are the sessions: a prompt holds the files as they
were, the answer edits them by calls, runs the tests and commits. Drafter and governor are those of
one row. The seconds of a pass are a model of costs, so that every run prints the same.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from math import inf
from pathlib import Path

from msgspec import Struct
from tokenizers import Tokenizer

from mlxstack.features.drafts.engine.drafter import NO_OFFER, Drafter
from mlxstack.features.drafts.engine.ngram_index import (
    MAX_MATCH,
    ORDER,
    IndexedText,
    Place,
    extended,
)
from mlxstack.features.drafts.policy.ngram_draft_governor import (
    MAX_DRAFTED,
    DraftOffer,
    DraftRecord,
    StepBounds,
    compared,
    lead_after,
    pass_seconds,
    verified,
    widths,
)
from mlxstack.policy.pass_layout import PassLayout, WidthCosts

CHECKOUT = Path(__file__).parents[3]
MAX_SESSIONS = 40
"""Sessions of a day, the latest."""
MAX_FILES = 4
MAX_PROMPT = 40_000
MAX_ANSWER = 6_000
"""Characters of the files in a prompt, and of the edits in an answer."""
MAX_PAST_TOKENS = 65_536
"""Tokens of past answers that are kept, the latest."""
MIN_MATCHES = (4, 8, 20)
"""Tokens that must agree with a past answer before it is copied."""
STEP_S = 0.02
WIDENING = {"memory-bound, as on a GPU": 0.03, "compute-bound, as on a CPU": 0.3}
"""Cost of a further token in a pass, relative to the first one."""
HUNK = re.compile(r"^@@ .*$", re.MULTILINE)


class Session(Struct, frozen=True):
    """Prompt and answer in tokens."""

    prompt: list[int]
    answer: list[int]


class Totals(Struct):
    """Sums over replayed sessions."""

    n_tokens: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    seconds: float = 0.0


class PastAnswers:
    """Follows an answer in past ones, where at least `min_match` tokens agree."""

    def __init__(self, text: IndexedText, prompt: Sequence[int], min_match: int) -> None:
        self._text = text
        self._min_match = min_match
        self._tokens = list(prompt[-MAX_MATCH:])
        self._gram = 0
        for token in self._tokens[-ORDER:]:
            self._gram = extended(self._gram, token)
        self._next = self._find()

    def append(self, token: int) -> None:
        """The answer goes on with `token`."""
        self._tokens.append(token)
        self._gram = extended(self._gram, token)
        place = self._next
        is_right = place is not None and place.tokens[place.offset] == token
        if place is not None and is_right and place.offset + 1 < len(place.tokens):
            self._next = Place(place.tokens, place.offset + 1)
        else:
            self._next = self._find()

    def continuation(self, n: int) -> list[int]:
        """At most `n` tokens that followed."""
        if self._next is None:
            return []
        return list(self._next.tokens[self._next.offset : self._next.offset + n])

    def _find(self) -> Place | None:
        places = self._text.places(self._gram)
        place = max(places, key=self._match, default=None)
        if place is None or self._match(place) < self._min_match:
            return None
        return place

    def _match(self, place: Place) -> int:
        n = ORDER
        longest = min(place.offset, MAX_MATCH, len(self._tokens))
        while n < longest and place.tokens[place.offset - 1 - n] == self._tokens[-1 - n]:
            n += 1
        return n


class PastDrafter(Drafter):
    """Copies from past answers where the prompt offers nothing, by a record of their own."""

    def __init__(self, prompt: Sequence[int], past: PastAnswers) -> None:
        super().__init__(prompt, frozenset())
        self._past = past
        self._past_record = DraftRecord()
        self._is_past = False

    def propose(self, forced: Sequence[int], most: int) -> DraftOffer:
        offer = super().propose(forced, most)
        if offer.n_tokens or self._index.continuation(1) or self._past_record.is_paused:
            return offer
        self._proposed = tuple(self._past.continuation(min(most, self._past_record.width)))
        self._is_past = bool(self._proposed)
        return (
            DraftOffer(len(self._proposed), self._past_record.rate) if self._is_past else NO_OFFER
        )

    def settle(self, tokens: Sequence[int], n_drafted: int) -> None:
        record = self._past_record
        past = self._past.continuation(1)
        if self._is_past and n_drafted:
            self._past_record = verified(record, n_drafted, len(tokens) - 1)
        elif past and not self._index.continuation(1):
            self._past_record = compared(record, past[0] == tokens[0])
        super().settle(tokens, 0 if self._is_past else n_drafted)
        self._is_past = False
        for token in tokens:
            self._past.append(token)


DrafterOf = Callable[[Session], Drafter]


def git(*arguments: str) -> str:
    """Output of git in the checkout."""
    done = subprocess.run(["git", *arguments], cwd=CHECKOUT, capture_output=True, check=True)
    return done.stdout.decode("utf-8", "replace")


def sessions_of(day: str, tokenizer: Tokenizer) -> list[Session]:
    """Sessions of a day, the earlier first."""
    lines = git("log", "--no-merges", "--format=%cs %H").splitlines()
    commits = [line.split()[1] for line in lines if line.startswith(f"{day} ")]
    sessions = [session_of(commit, tokenizer) for commit in reversed(commits[:MAX_SESSIONS])]
    return [session for session in sessions if session is not None]


def session_of(commit: str, tokenizer: Tokenizer) -> Session | None:
    """The commit as a session; None where it edits no text."""
    names = git("show", "--format=", "--name-only", "--diff-filter=M", commit).splitlines()
    paths = [name for name in names if name.endswith((".py", ".md"))][:MAX_FILES]
    if not paths:
        return None
    subject = git("show", "-s", "--format=%s", commit).strip()
    max_file = MAX_PROMPT // len(paths)
    reads = [
        f"{call('read_file', path=path)}\n{git('show', f'{commit}^:{path}')[:max_file]}"
        for path in paths
    ]
    edits = "\n".join(edit for path in paths for edit in edits_of(commit, path))
    command = f'git commit -m "{subject}" -- {" ".join(paths)}'
    calls = (edits[:MAX_ANSWER], call("run", command="make check"), call("run", command=command))
    prompt = "\n".join((f"Task: {subject}", *reads))
    return Session(tokenizer.encode(prompt).ids, tokenizer.encode("\n".join(calls)).ids)


def edits_of(commit: str, path: str) -> Iterator[str]:
    """A call per hunk."""
    diff = git("show", "--format=", "-U1", commit, "--", path)
    for hunk in HUNK.split(diff)[1:]:
        lines = hunk.strip("\n").split("\n")
        old = "\n".join(line[1:] for line in lines if line[:1] in {" ", "-"})
        new = "\n".join(line[1:] for line in lines if line[:1] in {" ", "+"})
        yield call("edit_file", path=path, old=old, new=new)


def call(name: str, **arguments: str) -> str:
    """Call as a model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def replayed(sessions: Sequence[Session], drafter_of: DrafterOf, costs: WidthCosts) -> Totals:
    """Decode the answers of sessions, one after the other."""
    totals = Totals()
    for session in sessions:
        drafter = drafter_of(session)
        position = 0
        while position < len(session.answer):
            position += step(session.answer, position, drafter, costs, totals)
    return totals


def step(
    answer: Sequence[int], position: int, drafter: Drafter, costs: WidthCosts, totals: Totals
) -> int:
    """One pass; the number of tokens that it gives."""
    offer = drafter.propose((), min(MAX_DRAFTED, len(answer) - position - 1))
    bounds = StepBounds(inf, (drafter.lead_s,))
    draft = drafter.take(widths([offer], costs, PassLayout.RAGGED, bounds)[0])
    n_accepted = 0
    while n_accepted < len(draft) and draft[n_accepted] == answer[position + n_accepted]:
        n_accepted += 1
    seconds = pass_seconds([1 + len(draft)], costs)
    drafter.lead_s = lead_after(drafter.lead_s, n_accepted, seconds, costs.seconds_at(1))
    tokens = answer[position : position + n_accepted + 1]
    drafter.settle(tokens, len(draft))
    totals.n_tokens += len(tokens)
    totals.n_drafted += len(draft)
    totals.n_accepted += n_accepted
    totals.seconds += seconds
    return len(tokens)


def row(name: str, totals: Totals) -> str:
    """Line of the table."""
    return (
        f"| {name} | {totals.n_tokens:,} | {totals.n_accepted:,} of {totals.n_drafted:,} "
        f"| {totals.n_accepted / (1000 * totals.seconds):.4f} "
        f"| {totals.n_tokens / totals.seconds:.1f} |\n"
    )


def prompt_alone(session: Session) -> Drafter:
    """Drafter as it is."""
    return Drafter(session.prompt, frozenset())


def past_drafter(past: IndexedText, min_match: int) -> DrafterOf:
    """Drafter with past answers behind the prompt."""
    return lambda session: PastDrafter(session.prompt, PastAnswers(past, session.prompt, min_match))


def report(first: Sequence[Session], second: Sequence[Session], costs: WidthCosts) -> Iterator[str]:
    """Lines of the table for these costs."""
    answers = [token for session in first for token in session.answer][-MAX_PAST_TOKENS:]
    past = IndexedText(answers)
    yield row(f"first day, {len(first)} sessions", replayed(first, prompt_alone, costs))
    yield row(f"second day, {len(second)} sessions", replayed(second, prompt_alone, costs))

    def pooled(session: Session) -> Drafter:
        return Drafter([*answers, *session.prompt], frozenset())

    yield row("second day, past answers before the prompt", replayed(second, pooled, costs))
    for min_match in MIN_MATCHES:
        totals = replayed(second, past_drafter(past, min_match), costs)
        yield row(f"second day, past answers behind it, {min_match} tokens agree", totals)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer", help="tokenizer.json of a model")
    parser.add_argument("first", help="day of the past answers")
    parser.add_argument("second", help="day that is replayed with them")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(arguments.tokenizer)
    first = sessions_of(arguments.first, tokenizer)
    second = sessions_of(arguments.second, tokenizer)
    sizes = tuple(range(1, MAX_DRAFTED + 2))
    for name, share in WIDENING.items():
        costs = WidthCosts(sizes, tuple(STEP_S * (1 + share * (n - 1)) for n in sizes))
        sys.stdout.write(f"\n{name}: a further token costs {share:.0%} of a pass\n\n")
        sys.stdout.write("| sessions | tokens | accepted | accepted/ms | tokens/s |\n")
        sys.stdout.write("|---|---:|---:|---:|---:|\n")
        for line in report(first, second, costs):
            sys.stdout.write(line)
            sys.stdout.flush()


if __name__ == "__main__":
    main()
