"""Jobs and results of the in-process child of a benchmark."""

from msgspec import Struct


class BuildModel(Struct, frozen=True, tag=True):
    """Random Llama (float32) of about 12 * layers * width^2 parameters.

    Its head chooses digits only: a token is one piece of text in every server's stream, and the
    same token when it comes back as history.
    """

    folder: str
    n_layers: int = 8
    width: int = 512
    seed: int = 0


class Steps(Struct, frozen=True, tag=True):
    """Decode rows over `contexts` tokens, ours and mlx-lm's by turns.

    Gives `bytes` (held by the rows) of ours, theirs and alone, and `step_s` of ours and theirs.
    """

    contexts: tuple[int, ...]
    n_steps: int = 20
    passes: int = 3


class ExactSteps(Struct, frozen=True, tag=True):
    """Decode rows over `contexts` tokens, by turns with equal bits.

    Gives `step_s` of ours and exact.
    """

    contexts: tuple[int, ...]
    n_steps: int = 20
    passes: int = 3


class Joins(Struct, frozen=True, tag=True):
    """Row of `n_newcomer` tokens joining a batch of `n_bytes` KV.

    Gives `join_s` and `leave_s` of ours and theirs, until all KV of the batch is in its place.
    """

    n_bytes: int
    n_newcomer: int = 200
    passes: int = 3


class LoopRuleCost(Struct, frozen=True, tag=True):
    """The rule against repetition over answers of `n_tokens`.

    Gives `token_s` of answers that are plain, that are one text twice, and that copy a repetition
    of their prompt, which has twice as many tokens.
    """

    n_tokens: int = 4000
    passes: int = 3


class SingleFloor(Struct, frozen=True, tag=True):
    """Compute `n_new` tokens after `n_context` known ones, with mlx-lm alone: `ttft_s`."""

    n_context: int
    n_new: int
    passes: int = 3


class LoadFiles(Struct, frozen=True, tag=True):
    """Read .safetensors files under `folder` by `mx.load`: seconds and bytes.

    In memory that is new to the process when this is its first trial.
    """

    folder: str


class FullEngine(Struct, frozen=True, tag=True):
    """The whole engine, thread and scheduler included, answers `n_rows` asks: `step_s`."""

    n_rows: int
    n_prompt: int = 200
    n_tokens: int = 100
    passes: int = 3


class BatchAnswers(Struct, frozen=True, tag=True):
    """mlx-lm's BatchGenerator answers `n_rows` prompts: `step_s` while all rows decode."""

    n_rows: int
    n_prompt: int = 200
    n_tokens: int = 128
    passes: int = 1


class Drafts(Struct, frozen=True, tag=True):
    """Engine answers to each scene, by turns with drafts and without.

    A scene names the text of each request: "copied", "schema", "prose" or "adversarial" of random
    tokens, or one of `asked`, messages of users; `ruled` of them are answered under a schema.
    Gives, of on and off and by scene, `token_s`, `passes`, `drafted`, `accepted`, both of a draft
    model alone too, and the `gap_s` between two tokens of prose that 99 % do not exceed.
    """

    scenes: dict[str, tuple[str, ...]]
    n_prompt: int = 200
    n_tokens: int = 132
    passes: int = 3
    asked: dict[str, str] = {}
    ruled: tuple[str, ...] = ()
    draft: str | None = None
    """`model.draft` of the side with drafts."""


class FollowUp(Struct, frozen=True, tag=True):
    """Text work of a next turn after `n_tokens`, and from scratch.

    Gives `prompt_s` (template and tokens) and `hash_s` (block keys) of next and scratch.
    """

    n_tokens: int
    passes: int = 3


Trial = (
    BuildModel
    | Steps
    | ExactSteps
    | Joins
    | LoopRuleCost
    | SingleFloor
    | BatchAnswers
    | LoadFiles
    | FullEngine
    | Drafts
    | FollowUp
)


class BenchJob(Struct, frozen=True):
    """Trials in order, in one process, for a model folder."""

    model: str
    trials: tuple[Trial, ...]


class TrialSamples(Struct, frozen=True):
    """The figure `quantity` of `who`, measured once per pass; seconds or bytes."""

    who: str
    quantity: str
    values: tuple[float, ...]


class BenchResult(Struct, frozen=True):
    """Samples of one trial."""

    samples: tuple[TrialSamples, ...] = ()

    def of(self, who: str, quantity: str) -> tuple[float, ...]:
        """The values of one figure. Raises KeyError when it was not measured."""
        for sample in self.samples:
            if (sample.who, sample.quantity) == (who, quantity):
                return sample.values
        raise KeyError(f"{quantity} of {who} was not measured")
