"""Loads the draft model or MTP head of a preset."""

import logging
from collections.abc import Callable

from mlx.utils import tree_flatten
from msgspec import Struct

from mlxstack.core.errors import SetupError
from mlxstack.core.preset import KVSpec, Preset, Speculation
from mlxstack.engine import device
from mlxstack.engine.decode.batching_check import BatchingCheck
from mlxstack.engine.decode.draft_model import DraftModel
from mlxstack.engine.decode.mtp_drafter import MTPDrafter
from mlxstack.engine.loading import loader
from mlxstack.engine.loading.loader import LoadedModel
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.runner import ModelParts, ModelRunner
from mlxstack.host.load_progress import LoadProgress

log = logging.getLogger(__name__)

SelfCheck = Callable[[LoadedModel, CacheFactory], BatchingCheck]


class LoadedDrafts(Struct, frozen=True):
    """Draft model or MTP head, if any, and bytes of its weights."""

    model: DraftModel | None = None
    n_bytes: int = 0

    @property
    def target(self) -> ModelParts | None:
        """The target in parts, where drafts need its hidden states."""
        return None if self.model is None else self.model.target

    @property
    def bytes_per_token(self) -> int:
        """Bytes that drafts add to every token's KV."""
        return 0 if self.model is None else self.model.bytes_beside


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
        why = check.why_not or check.why_no_drafts
        raise SetupError(f"{key}: {spec.id} cannot use drafts: {why}; remove {key}")
    if spec.draft is None:
        is_drafting = check.can_draft and preset.speculation is Speculation.AUTO
        if not (is_drafting and has_states):
            return LoadedDrafts()
        head = loader.load_mtp(spec, loaded, progress)
        if head is None:
            return LoadedDrafts()
        log.info("drafts come from the MTP head of %s", spec.id)
        n_bytes = sum(array.nbytes for _, array in tree_flatten(head.parameters()))
        return LoadedDrafts(MTPDrafter(head, check, loaded.facts.n_vocab), n_bytes)
    draft = loader.load_draft(spec, loaded, progress)
    loader.check_context(draft.facts, preset.slots.n_ctx, "model.draft: ")
    factory = CacheFactory(draft.model, KVSpec())
    draft_check = self_check(draft, factory)
    device.release()
    runner = ModelRunner(
        draft.model, is_batching=draft_check.is_batching, is_ragged=draft_check.is_ragged
    )
    n_vocab = min(loaded.facts.n_vocab, draft.facts.n_vocab)
    return LoadedDrafts(DraftModel(spec.draft, runner, factory, n_vocab), draft.facts.n_bytes)
