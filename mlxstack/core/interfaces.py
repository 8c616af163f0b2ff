"""Interfaces that the engine depends on, injected at start-up."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from msgspec import Struct

from mlxstack.core.commands import CollectGarbage, GCResult
from mlxstack.core.conversation import Tool
from mlxstack.core.engine_events import FinishReason
from mlxstack.core.image import ImageSize
from mlxstack.core.prompt_tokens import ImageRange
from mlxstack.core.response_parts import AnswerPart, CallBlock

CallSoon = Callable[[Callable[[], None]], None]
"""Runs a function on the thread that it belongs to, soon."""


class TensorBytes(Struct, frozen=True):
    """One array as bytes, row-major, little-endian; `dtype` as in safetensors: "F16", "U32"."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview


class KVFile(Struct, frozen=True):
    """Stored file: KV of the tokens [start, end) of a prefix.

    `kind` is "segment" (sliceable layers) or "checkpoint" (the others, at exactly `end`).
    `identity` is `Identity.key()`. `meta` is for the engine alone, opaque to the store.
    """

    key: str
    kind: str
    identity: str
    start: int
    end: int
    tensors: tuple[TensorBytes, ...]
    meta: str = ""


class KVFileHeader(Struct, frozen=True):
    """Header of a KV file, unchecked; `n_bytes` of the tensors.

    `shapes` are dtype and shape of every tensor.
    """

    key: str
    kind: str
    start: int
    end: int
    n_bytes: int
    meta: str = ""
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    identity: str = ""


class KVStore(Protocol):
    """Content-addressed KV files on disk. Every method is thread-safe."""

    def has(self, identity: str, key: str) -> bool:
        """Whether a file of this key exists (not whether it is sound)."""

    def write(self, file: KVFile) -> int:
        """Store at most once per key, durably after `flush`; bytes newly written.

        0 if it was there. A file of this key with another header is replaced.
        Raises StackError when the disk refuses.
        """

    def flush(self) -> None:
        """Make all written files durable by one flush. Raises StackError."""

    def read(self, identity: str, key: str) -> KVFile:
        """The file, checked. Raises NotFound or Damaged."""

    def make_room(self, n_bytes: int, in_use: frozenset[tuple[str, str]]) -> GCResult:
        """Free `n_bytes`, sparing files in use; returns the deleted ones.

        Raises DiskFull when there is none.
        """

    def sweep(self, command: CollectGarbage, in_use: frozenset[tuple[str, str]]) -> GCResult:
        """Delete by age and bytes. Raises BadRequest when neither is bounded."""

    def note(self, identity: str, data: bytes) -> None:
        """Store a note beside this identity's KV files. Raises StackError."""

    def noted(self, identity: str) -> bytes | None:
        """The note; None when there is none that can be read."""

    def head(self, identity: str, key: str) -> KVFileHeader:
        """Header of a file, of which only the name is checked.

        Raises NotFound or Damaged.
        """

    def read_into(self, identity: str, key: str, rows: Iterable[memoryview]) -> None:
        """Read all planes into `rows`, one after the other, and check them.

        Raises NotFound or Damaged; then the rows hold anything.
        """

    def headers(self, identity: str) -> Iterator[KVFileHeader]:
        """Headers of one identity's files, unchecked; damaged files are set aside."""


class CallMarkers(Struct, frozen=True):
    """Marks around a block of calls in a prompt."""

    start: str
    end: str
    header: str = ""
    """The block begins right after it, or with `start` where there is none."""
    optional: tuple[str, ...] = ()
    """Marks that a sampled call may have where the template writes none."""


class AnswerParser(Protocol):
    """Parser of one answer, token by token. Single owner."""

    blocks: list[CallBlock]
    """Tokens of complete calls, for the caller to take."""
    n_blocks: int
    n_reasoning: int
    """Tokens spent on thoughts."""
    n_unparsed: int
    """Calls that did not parse."""
    is_cut: bool
    """Whether a call, or a part of it, was lost to the end of the answer."""

    @property
    def stop(self) -> str | None:
        """The stop string that was met; the answer is over."""

    def push(self, token: int) -> list[AnswerPart]:
        """The parts that become certain with this token."""

    def finish(self, reason: FinishReason) -> list[AnswerPart]:
        """The parts that were held back, once no token follows."""


class FormatReport(Struct, frozen=True):
    """Marks, origin and faults of an answer format."""

    name: str
    source: str
    """Origin of the description: "derived", "family", "mlx-lm", "fallback" or "none"."""
    is_certain: bool
    """Whether every probe was read back."""
    problems: tuple[str, ...] = ()
    """Probes that were not."""
    reasoning: tuple[str, str] | None = None
    """Marks around a thought, the first "" where none is needed."""
    calls: tuple[str, ...] = ()
    """Literals of a call."""
    turn_ends: tuple[str, ...] = ()
    """Texts that end an answer."""


class AnswerFormat(Protocol):
    """Format of one model's answers, shared by all of them."""

    @property
    def report(self) -> FormatReport:
        """Marks, origin and faults of the format."""

    @property
    def has_thoughts(self) -> bool:
        """Whether answers may have thoughts."""

    @property
    def marks(self) -> tuple[str, ...]:
        """All texts that are structure and not content."""

    @property
    def marks_of_calls(self) -> tuple[str, ...]:
        """Marks that open and close a call."""

    @property
    def call_markers(self) -> CallMarkers:
        """Marks around a block of calls."""

    def opens_thought(self, tail: str) -> bool:
        """Whether the end of a prompt leaves a thought open."""

    def parser(
        self,
        make_id: Callable[[], str],
        *,
        tools: Sequence[Tool] = (),
        stops: Sequence[str] = (),
        is_in_thinking: bool = False,
        before: Sequence[int] = (),
        is_raw: bool = False,
        has_grammar: bool = False,
    ) -> AnswerParser:
        """Parser of an answer to a prompt.

        `make_id` names a call to which the model gave no id. `tools` are all offered tools,
        deferred ones too. `before` are the last tokens of a text that the answer continues.
        With `is_raw` nothing is a mark; with `has_grammar` a grammar rules the content.
        """


class ImageProcessor(Protocol):
    """Image processing of a family of models, without MLX."""

    @property
    def placeholder(self) -> str:
        """Text of the token in place of a feature."""

    @property
    def written(self) -> str:
        """Text that the chat template writes for one image.

        It is replaced by `framed` where it differs.
        """

    @property
    def framed(self) -> str:
        """The placeholder within the text that surrounds it in a chat."""

    @property
    def fingerprint(self) -> str:
        """Family, parameters, code version and weights of the tower, as text."""

    def size(self, width: int, height: int, detail: str = "auto") -> ImageSize:
        """Size after resizing of an image of `width` x `height` pixels, upright."""

    def expand(self, size: ImageSize) -> tuple[str | None, ...]:
        """Replacement of the placeholder: texts of special tokens, None for each feature."""

    def pixels(self, image: Any, size: ImageSize) -> Any:
        """Input of the tower (float32 numpy) of an upright RGB image."""


class ConstraintState(Protocol):
    """Structured-output state of one response; not thread-safe."""

    def mask(self) -> bytes | None:
        """Bit mask of the allowed tokens, lowest first; None: all."""

    def advance(self, token: int) -> None:
        """The answer goes on with `token`. Raises StackError when it may not."""

    @property
    def is_ruled(self) -> bool:
        """Whether a grammar rules the next token."""

    def forced_tokens(self) -> Sequence[int]:
        """Next tokens that the grammar forces, up to a tokenization choice."""

    def close_thought(self) -> bool:
        """End the thought as a spent budget does; False outside of one."""

    def position(self) -> object:
        """Position to pass to `rewind`."""

    def rewind(self, position: object) -> None:
        """Take back the tokens since that position."""


class Constraint(Protocol):
    """Structured output: a grammar that constrains decoding. Thread-safe."""

    def start(self) -> ConstraintState:
        """The state at the first token of an answer."""


class Manifest(Struct, frozen=True):
    """Saved context: its tokens, their images and, in order, their KV files.

    `model` is the name of the model for display; `salt` the tenant of the tokens.
    """

    identity: str
    tokens: tuple[int, ...]
    segments: tuple[str, ...]
    checkpoints: tuple[str, ...] = ()
    n_bytes: int = 0
    model: str = ""
    salt: str = ""
    images: tuple[ImageRange, ...] = ()


class SlotFileStore(Protocol):
    """Named manifests of one directory: the slot files. Callable from any thread."""

    def check(self, name: str) -> None:
        """Raises BadRequest when `name` is not a safe file name."""

    def check_replaceable(self, name: str) -> None:
        """Raise BadRequest for a bad name, Conflict for a foreign file."""

    def write(self, name: str, manifest: Manifest) -> int:
        """Replace atomically and durably; bytes written. Raises as `check_replaceable`."""

    def read(self, name: str) -> Manifest:
        """Raises NotFound or Damaged."""


class AgentManifestStore(Protocol):
    """The saved contexts of agents. Callable from any thread."""

    def put(self, agent: str, manifest: Manifest) -> None:
        """Replace an agent's saved context for the manifest's model. Raises StackError."""

    def identities(self, agent: str) -> frozenset[str]:
        """Identities of the models with saved KV of this agent."""


class CheckStore(Protocol):
    """Results of self-checks, by what they depend on."""

    def load(self, key: str) -> bytes | None:
        """Bytes of a result; None without one."""

    def save(self, key: str, result: bytes) -> None:
        """Keep a result; where the disk refuses, it is lost."""


class EngineStores(Struct, frozen=True):
    """Stores of an engine on disk."""

    kv: KVStore
    slot_files: SlotFileStore
    manifests: AgentManifestStore | None = None
    """Saved contexts of agents."""
    checks: CheckStore | None = None
    """Results of self-checks at earlier loads; None: each load checks."""
