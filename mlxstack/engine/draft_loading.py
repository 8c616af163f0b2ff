"""Loads the draft model or MTP head of a preset."""

import logging
from collections.abc import Callable

from mlx.utils import tree_flatten
from msgspec import Struct

from mlxstack.core.errors import SetupError
from mlxstack.core.preset import KVSpec, Preset, Speculation
from mlxstack.engine import device
from mlxstack.engine.decode.batching_check import BatchingCheck
from mlxstack.engine.decode.draft_coordinator import DraftCoordinator
from mlxstack.engine.decode.draft_model import DraftModel
from mlxstack.engine.decode.mtp_drafter import MTPDrafter
from mlxstack.engine.decode.proposer import NO_PROPOSALS, Proposer
from mlxstack.engine.loading import loader
from mlxstack.engine.loading.loader import LoadedModel
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.runner import ModelParts, ModelRunner
from mlxstack.host.load_progress import LoadProgress
from mlxstack.policy.drafts.ngram_draft_governor import WidthCosts
from mlxstack.policy.scheduling.chunked_prefill import PrefillPolicy

log = logging.getLogger(__name__)

SelfCheck = Callable[[LoadedModel, CacheFactory], BatchingCheck]


class LoadedDrafts(Struct, frozen=True):
    """Draft model or MTP head of a preset, and its bytes."""

    is_active: bool
    """Whether rows are drafted for at all."""
    model: DraftModel | None = None
    """Draft model or MTP head, if any."""
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

    def proposer(self, runner: ModelRunner, costs: WidthCosts, policy: PrefillPolicy) -> Proposer:
        """Proposer for the batch of this runner, whose passes have these costs."""
        if self.is_active:
            return DraftCoordinator(runner, costs, self.model, policy)
        return NO_PROPOSALS


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
        drafts = _load_model(preset, spec.draft, loaded, self_check, progress)
    elif is_active and has_states:
        drafts = _load_head(preset, loaded, check, progress)
    else:
        drafts = LoadedDrafts(is_active)
    if drafts.model is not None:
        drafts.model.placeholder = loaded.inputs.placeholder
    return drafts


def _load_head(
    preset: Preset, loaded: LoadedModel, check: BatchingCheck, progress: LoadProgress
) -> LoadedDrafts:
    head = loader.load_mtp(preset.model, loaded, progress)
    if head is None:
        return LoadedDrafts(is_active=True)
    log.info("drafts come from the MTP head of %s", preset.model.id)
    n_bytes = sum(array.nbytes for _, array in tree_flatten(head.parameters()))
    return LoadedDrafts(True, MTPDrafter(head, check, loaded.facts.n_vocab), n_bytes)


def _load_model(
    preset: Preset, name: str, loaded: LoadedModel, self_check: SelfCheck, progress: LoadProgress
) -> LoadedDrafts:
    draft = loader.load_draft(preset.model, loaded, progress)
    loader.check_context(draft.facts, preset.slots.n_ctx, "model.draft: ")
    factory = CacheFactory(draft.model, KVSpec())
    check = self_check(draft, factory)
    device.release()
    runner = ModelRunner(draft.model, is_batching=check.is_batching, is_ragged=check.is_ragged)
    n_vocab = min(loaded.facts.n_vocab, draft.facts.n_vocab)
    return LoadedDrafts(True, DraftModel(name, runner, factory, n_vocab), draft.facts.n_bytes)
