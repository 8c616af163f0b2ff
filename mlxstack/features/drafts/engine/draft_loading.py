"""Loads the draft model, drafter or MTP head of a preset."""

import logging
from collections.abc import Callable
from pathlib import Path

from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_utils
from msgspec import Struct

from mlxstack.core.errors import SetupError
from mlxstack.core.preset import KVSpec, ModelSpec, Preset, Speculation
from mlxstack.engine import device
from mlxstack.engine.decode.batching_check import BatchingCheck
from mlxstack.engine.loading import loader
from mlxstack.engine.loading.hub_download import fetch_head
from mlxstack.engine.loading.loader import LoadedModel
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.runner import ModelParts, ModelRunner
from mlxstack.features.drafts.engine.draft_coordinator import DraftCoordinator
from mlxstack.features.drafts.engine.draft_model import DraftModel
from mlxstack.features.drafts.engine.drafter_loading import load_drafter
from mlxstack.features.drafts.engine.mtp_drafter import MTPDrafter
from mlxstack.features.drafts.engine.mtp_head import MTPHead, load_head
from mlxstack.features.drafts.engine.small_model import SmallModel
from mlxstack.host.load_progress import LoadProgress
from mlxstack.models.bounded_json import read_config_object
from mlxstack.models.drafter_configs import DrafterKind, drafter_kind, is_drafter
from mlxstack.models.folder_check import check_folder
from mlxstack.models.model_files import CONFIG
from mlxstack.policy.pass_layout import WidthCosts
from mlxstack.policy.scheduling.chunked_prefill import PrefillPolicy

log = logging.getLogger(__name__)

MAX_MORE_TOKENS = 256
"""Tolerated surplus of the larger vocabulary of draft and target."""

SelfCheck = Callable[[LoadedModel, CacheFactory], BatchingCheck]


class LoadedDrafts(Struct, frozen=True):
    """Draft model, drafter or MTP head of a preset, and its bytes."""

    is_active: bool
    """Whether rows are drafted for at all."""
    model: DraftModel | None = None
    """Draft model, drafter or MTP head, if any."""
    n_bytes: int = 0
    """Bytes of its weights."""

    @property
    def target(self) -> ModelParts | None:
        """The model in parts, where its hidden states are needed."""
        return self.model.target if self.model else None

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a token adds beside the KV of the model."""
        return self.model.bytes_beside if self.model else 0

    def coordinator(
        self, runner: ModelRunner, costs: WidthCosts, policy: PrefillPolicy
    ) -> DraftCoordinator | None:
        """Proposer for the batch of this runner, whose passes have these costs."""
        if self.is_active:
            return DraftCoordinator(runner, costs, self.model, policy)
        return None


def load_drafts(
    preset: Preset,
    loaded: LoadedModel,
    check: BatchingCheck,
    self_check: SelfCheck,
    progress: LoadProgress,
    *,
    has_states: bool,
) -> LoadedDrafts:
    """Load the drafts of a checked target. Raises SetupError.

    A head is used where passes return hidden states: `has_states`.
    """
    spec = preset.model
    key = "model.mtp" if spec.draft is None else "model.draft"
    if not check.can_draft and (spec.draft or spec.mtp):
        reason = check.why_not or check.why_no_drafts
        raise SetupError(f"{key}: {spec.id} cannot use drafts: {reason}; remove {key}")
    is_active = check.can_draft and preset.speculation is Speculation.AUTO
    if spec.draft is not None:
        drafts = _load_draft(preset, loaded, check, self_check, progress, has_states=has_states)
    elif is_active and has_states:
        drafts = _load_head(preset, loaded, check, progress)
    else:
        drafts = LoadedDrafts(is_active)
    if drafts.model is not None:
        drafts.model.placeholder = loaded.inputs.placeholder
    return drafts


def _load_draft(
    preset: Preset,
    loaded: LoadedModel,
    check: BatchingCheck,
    self_check: SelfCheck,
    progress: LoadProgress,
    *,
    has_states: bool,
) -> LoadedDrafts:
    """Drafter or draft model, by the config in its folder."""
    name = preset.model.draft
    assert name is not None
    try:
        folder = loader.locate(ModelSpec(id=name), progress)
        check_folder(folder)
        config = read_config_object(folder / CONFIG)
    except SetupError as error:
        raise SetupError(f"model.draft: {error.message}") from error
    kind = drafter_kind(config)
    if kind is None and is_drafter(config):
        known = ", ".join(one.value for one in DrafterKind)
        raise SetupError(
            f"model.draft: {name} is a drafter of another kind than {known}, by its config.json; "
            "remove model.draft"
        )
    if kind is None:
        return _load_model(preset, name, loaded, self_check, progress)
    if not has_states:
        raise SetupError(
            f"model.draft: {name} is a {kind.value} drafter, which needs hidden states of layers, "
            "and those of several hosts are not brought together; remove model.draft"
        )
    model, n_bytes = load_drafter(name, kind, folder, config, loaded, check)
    log.info("drafts come from the %s drafter %s", kind.value, name)
    return LoadedDrafts(True, model, n_bytes)


def _load_head(
    preset: Preset, loaded: LoadedModel, check: BatchingCheck, progress: LoadProgress
) -> LoadedDrafts:
    head = load_mtp(preset.model, loaded, progress)
    if head is None:
        return LoadedDrafts(is_active=True)
    log.info("drafts come from the MTP head of %s", preset.model.id)
    n_bytes = sum(array.nbytes for _, array in tree_flatten(head.parameters()))
    return LoadedDrafts(True, MTPDrafter(head, check, loaded.facts.n_vocab), n_bytes)


def _load_model(
    preset: Preset, name: str, loaded: LoadedModel, self_check: SelfCheck, progress: LoadProgress
) -> LoadedDrafts:
    draft = load_draft(preset.model, loaded, progress)
    loader.check_context(draft.facts, preset.slots.n_ctx, "model.draft: ")
    factory = CacheFactory(draft.model, KVSpec())
    check = self_check(draft, factory)
    device.release()
    runner = ModelRunner(draft.model, rows=check.rows)
    n_vocab = min(loaded.facts.n_vocab, draft.facts.n_vocab)
    return LoadedDrafts(True, SmallModel(name, runner, factory, n_vocab), draft.facts.n_bytes)


def locate_drafts(spec: ModelSpec) -> None:
    """Download draft model and MTP head where needed. Raises SetupError."""
    if spec.draft is not None:
        loader.locate(ModelSpec(id=spec.draft))
    locate_head(spec)


def load_draft(spec: ModelSpec, target: LoadedModel, progress: LoadProgress) -> LoadedModel:
    """Load a draft model. Raises SetupError for a different vocabulary."""
    assert spec.draft is not None
    try:
        draft = loader.load(ModelSpec(id=spec.draft), KVSpec(), progress=progress)
    except SetupError as error:
        raise SetupError(f"model.draft: {error.message}") from error
    difference = _vocabulary_difference(target.tokenizer.get_vocab(), draft.tokenizer.get_vocab())
    if difference:
        raise SetupError(
            f"model.draft: {spec.draft} has another vocabulary than {spec.id} ({difference}), and "
            "drafts are tokens; take a small model of the same family, or remove model.draft"
        )
    return draft


def _vocabulary_difference(target: dict[str, int], draft: dict[str, int]) -> str:
    """Difference of the vocabularies, "" where drafts can be exchanged.

    The last tokens of one may be missing in the other: families add special tokens over time.
    """
    by_id = {token_id: token for token, token_id in target.items()}
    for token, token_id in sorted(draft.items(), key=lambda entry: entry[1]):
        if by_id.get(token_id, token) != token:
            text = by_id[token_id]
            return f"token {token_id} is {text!r} in one and {token!r} in the other"
    n_more = abs(len(target) - len(draft))
    if n_more > MAX_MORE_TOKENS:
        return f"{len(target)} and {len(draft)} tokens"
    return ""


def load_mtp(
    spec: ModelSpec, target: LoadedModel, progress: LoadProgress | None = None
) -> MTPHead | None:
    """MTP head of `spec.mtp` or of the model, if any.

    Raises SetupError for a `spec.mtp` that is no head for the model.
    """
    own = Path(target.facts.path)
    quantization = mlx_utils.load_config(own).get("quantization")
    try:
        head = load_head(target.model, locate_head(spec, progress) or own, quantization)
    except ValueError as error:
        if spec.mtp is not None:
            raise SetupError(
                f"model.mtp: the MTP head of {spec.mtp} does not fit {spec.id}: {error}"
            ) from error
        log.warning("the MTP head of %s is not used: %s", spec.id, error)
        return None
    if head is None and spec.mtp is not None:
        raise SetupError(
            f"model.mtp: {spec.mtp} has no MTP head; name the checkpoint that {spec.id} was "
            "converted from, or remove it"
        )
    return head


def locate_head(spec: ModelSpec, progress: LoadProgress | None = None) -> Path | None:
    """Folder with the tensors of `spec.mtp`. Raises SetupError."""
    if spec.mtp is None:
        return None
    folder = loader.local_folder(spec.mtp, "model.mtp: ")
    return folder or fetch_head(spec.mtp, progress or LoadProgress())
