"""Drafts of the whole engine, on several texts."""

import json
import queue
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from random import Random

from llguidance import LLMatcher
from msgspec import Struct

from mlxstack.bench.dev.trials import BenchResult, Drafts, TrialSamples
from mlxstack.bench.statistics import percentile
from mlxstack.core.engine_events import Event, RequestFailed, RequestFinished, TokenSampled
from mlxstack.core.engine_snapshot import Counters
from mlxstack.core.errors import Broken
from mlxstack.core.interfaces import Constraint, EngineStores
from mlxstack.core.preset import ModelSpec, Preset, SlotSpec, Speculation
from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.core.request import Caller, Request, SamplingParams
from mlxstack.engine.chat_engine import ChatEngine
from mlxstack.features.formats.grammar.constraint import ConstraintLayout, GrammarConstraint
from mlxstack.store.kv_store import DiskKVStore
from mlxstack.store.slot_files import SlotFileFolder
from mlxstack.text.grammar.compiler import GrammarCompiler

N_VOCAB = 1000
SIDES = ("off", "on")
COPIED = (40, 4)
ADVERSARIAL = (6, 3)
"""Tokens quoted from the prompt, and tokens that differ, by turns: an edit, and what looks so."""

NAMES = ("file_path", "old_string", "new_string", "replace_all")
SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string", "maxLength": 8} for name in NAMES},
    "required": list(NAMES),
    "additionalProperties": False,
}


class Quote(Struct, frozen=True):
    """Allows `n_quoted` tokens of `text` alone, then `n_free` of any."""

    text: tuple[int, ...]
    n_quoted: int
    n_free: int

    def start(self) -> "QuoteState":
        """The state at the first token of an answer."""
        return QuoteState(self)


class QuoteState:
    """Progress of an answer without a grammar: all drafts are guesses."""

    is_ruled = False

    def __init__(self, quote: Quote) -> None:
        self._quote = quote
        self._at = 0

    def mask(self) -> bytes | None:
        """One bit while the text is quoted."""
        quote = self._quote
        if self._at % (quote.n_quoted + quote.n_free) >= quote.n_quoted:
            return None
        token = quote.text[self._at % len(quote.text)]
        return bytes(token // 8) + bytes([1 << token % 8])

    def advance(self, token: int) -> None:
        """Any token leads to the next place."""
        self._at += 1

    def forced_tokens(self) -> tuple[int, ...]:
        """None."""
        return ()

    def close_thought(self) -> bool:
        """There is none."""
        return False

    def position(self) -> int:
        """Tokens so far."""
        return self._at

    def rewind(self, position: object) -> None:
        """Go back there."""
        assert isinstance(position, int)
        self._at = position


class MeasuredEngine:
    """An engine with or without drafts."""

    def __init__(self, engine: ChatEngine, arrived: "queue.SimpleQueue[tuple[float, Event]]"):
        self._engine = engine
        self._arrived = arrived

    @property
    def counters(self) -> Counters:
        """Totals so far."""
        return self._engine.snapshot().counters

    def answer(self, trial: Drafts, texts: Sequence[str], seed: int) -> dict[str, float]:
        """Seconds, passes and draft tokens of one answer per text."""
        before = self.counters
        for request in self._requests(trial, texts, seed):
            self._engine.submit(request)
        ended: list[RequestFinished] = []
        tokens: dict[str, list[float]] = {}
        while len(ended) < len(texts):
            moment, event = self._arrived.get()
            if isinstance(event, RequestFailed):
                raise event.error
            if isinstance(event, TokenSampled):
                tokens.setdefault(event.request, []).append(moment)
            if isinstance(event, RequestFinished):
                ended.append(event)
        work = [event.timings for event in ended]
        prose = [times for name, times in tokens.items() if name.startswith("prose")]
        gaps = [b - a for times in prose for a, b in pairwise(times)]
        now = self.counters
        return {
            "token_s": sum(w.decode_s for w in work) / sum(w.n_generated for w in work),
            "passes": now.n_decode_calls - before.n_decode_calls,
            "drafted": now.n_drafted_tokens - before.n_drafted_tokens,
            "accepted": now.n_accepted_tokens - before.n_accepted_tokens,
            "model_drafted": now.n_model_drafted_tokens - before.n_model_drafted_tokens,
            "model_accepted": now.n_model_accepted_tokens - before.n_model_accepted_tokens,
            **({"gap_s": percentile(gaps, 99)} if gaps else {}),
        }

    def check(self, *, is_drafting: bool) -> None:
        """Raise Broken if another path ran than the measured one."""
        snapshot = self._engine.snapshot()
        if snapshot.is_drafting != is_drafting:
            raise Broken("the self-check found that this model cannot draft: nothing to measure")
        if not is_drafting and snapshot.counters.n_drafted_tokens:
            raise Broken("the engine without drafts has drafted")

    def _requests(self, trial: Drafts, texts: Sequence[str], seed: int) -> list[Request]:
        random = Random(seed)
        requests = []
        for i, text in enumerate(texts):
            is_real = text in trial.asked
            if is_real:
                prompt = self._asked(trial, text, f"{seed}-{i}")
            else:
                prompt = random_prompt(trial, random)
            constraint, eos = self._constraint(trial, text, prompt)
            is_greedy = is_real or text in {"copied", "adversarial"}
            requests.append(
                Request(
                    f"{text}-{seed}-{i}",
                    PromptTokens(prompt),
                    trial.n_tokens,
                    SamplingParams(temperature=0.0 if is_greedy else 1.0, seed=i),
                    eos,
                    use_cache=False,
                    caller=Caller(salt=f"{seed}-{len(texts)}-{texts[0]}"),
                    constraint=constraint,
                    arrived=time.monotonic(),
                )
            )
        return requests

    def _asked(self, trial: Drafts, text: str, name: str) -> tuple[int, ...]:
        """Prompt of a user's message, another one for each `name`."""
        messages = [{"role": "user", "content": f"Request {name}. {trial.asked[text]}"}]
        return tuple(
            self._engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        )

    def _constraint(
        self, trial: Drafts, text: str, prompt: tuple[int, ...]
    ) -> tuple[Constraint | None, frozenset[int]]:
        if text in {"copied", "adversarial"}:
            return Quote(prompt, *(COPIED if text == "copied" else ADVERSARIAL)), frozenset()
        if text not in {"schema", *trial.ruled}:
            return None, frozenset()
        tokenizer = self._engine.tokenizer
        eos = frozenset(tokenizer.eos_token_ids)
        n_vocab = tokenizer.vocab_size
        grammar = LLMatcher.grammar_from_json_schema(
            json.dumps(SCHEMA), {"whitespace_flexible": False}
        )
        rules = GrammarCompiler(tokenizer, n_vocab).compile(grammar, "schema")
        return GrammarConstraint(ConstraintLayout(n_vocab, eos), rules), eos


def drafts(trial: Drafts, model: str) -> BenchResult:
    """Figures of both sides for each scene, pass by pass.

    Each pass loads both sides anew, the other one first: of two engines in one process the place of
    its weights in memory makes one faster by some percent.
    """
    samples: dict[tuple[str, str], list[float]] = {}
    for n_pass in range(trial.passes):
        order = sorted(SIDES, reverse=bool(n_pass % 2))
        with ExitStack() as stack:
            sides = {who: stack.enter_context(_side(trial, model, who == "on")) for who in order}
            for scene, texts in trial.scenes.items():
                for who in order:
                    for quantity, value in sides[who].answer(trial, texts, n_pass).items():
                        samples.setdefault((who, f"{scene}: {quantity}"), []).append(value)
            for who, side in sides.items():
                side.check(is_drafting=who == "on")
    return BenchResult(tuple(TrialSamples(*key, tuple(values)) for key, values in samples.items()))


def random_prompt(trial: Drafts, random: Random) -> tuple[int, ...]:
    """Tokens that mean nothing."""
    return tuple(random.randrange(N_VOCAB) for _ in range(trial.n_prompt))


@contextmanager
def _side(trial: Drafts, model: str, is_on: bool) -> Iterator[MeasuredEngine]:
    n_ctx = max(64, trial.n_prompt + trial.n_tokens + 64)
    slots = SlotSpec(count=max(map(len, trial.scenes.values())), n_ctx=n_ctx)
    preset = Preset(
        model=ModelSpec(id=model, draft=trial.draft if is_on else None),
        slots=slots,
        speculation=Speculation.AUTO if is_on else Speculation.OFF,
    )
    arrived: queue.SimpleQueue[tuple[float, Event]] = queue.SimpleQueue()

    def deliver(events: tuple[Event, ...]) -> None:
        for event in events:
            arrived.put((time.perf_counter(), event))

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        stores = EngineStores(DiskKVStore(root / "kv"), SlotFileFolder(root / "slots"))
        engine = ChatEngine(preset, stores, deliver)
        engine.start().result()
        try:
            yield MeasuredEngine(engine, arrived)
        finally:
            engine.stop(drain_s=1).result()
