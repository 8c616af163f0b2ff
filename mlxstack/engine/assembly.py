"""Assembly of an engine: the model, and all that serves it."""

import logging
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.engine_snapshot import Snapshot
from mlxstack.core.exact_rows import ExactBits, ExactRows
from mlxstack.core.interfaces import EngineStores
from mlxstack.core.model_info import ModelFacts
from mlxstack.core.preset import Preset
from mlxstack.engine import device
from mlxstack.engine.decode.batch import Batch
from mlxstack.engine.decode.batching_check import BatchingCheck
from mlxstack.engine.decode.copy_check import is_uncertain, why_not_copied
from mlxstack.engine.decode.proposer import NO_PROPOSALS
from mlxstack.engine.decode.remembered_checks import RememberedChecks
from mlxstack.engine.decode.row_grouper import NO_GROUPS, RowGrouper
from mlxstack.engine.decode.shared_passes import measure_sharing
from mlxstack.engine.decode.width_costs import measure_widths, pass_seconds
from mlxstack.engine.device_memory import DeviceMemory, MemoryPlan, memory_plan
from mlxstack.engine.idle_wait import idle_wait
from mlxstack.engine.kv.disk_tier import DiskTier
from mlxstack.engine.kv.park import BackgroundSteps
from mlxstack.engine.loading import loader
from mlxstack.engine.loading.loader import LoadedModel
from mlxstack.engine.loop import EngineLoop
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.length_rope import exact_ropes, keyed_by_length
from mlxstack.engine.model.runner import ModelRunner, kv_bytes_per_token
from mlxstack.engine.parts import EngineParts
from mlxstack.engine.slot_actions import SlotActionRunner
from mlxstack.engine.slots.slot_kv_manager import SlotKVManager
from mlxstack.engine.thread import EngineThread, LoadedEngine
from mlxstack.features.drafts.engine.draft_loading import LoadedDrafts, load_drafts
from mlxstack.features.drafts.engine.draft_prefill import DraftPrefill
from mlxstack.features.early_turns.engine import EarlyPrefill
from mlxstack.features.exact.engine import (
    ExactModel,
    MeasuredBits,
    exact_model,
    measure_bits,
    plan_of,
)
from mlxstack.features.loops.engine import loop_rule
from mlxstack.features.remote_kv.remote_prefill import RemotePrefill
from mlxstack.features.remote_kv.values import RemoteKV
from mlxstack.features.row_stacks.engine import RowStacker, stack_fully
from mlxstack.features.vision.towers.encoder import with_images
from mlxstack.host.hardware import MemoryBudget
from mlxstack.policy.attention_kernels import PrefillAttention
from mlxstack.policy.pass_layout import NOT_SHARED, UNMEASURED, SharedPrompts, WidthCosts
from mlxstack.policy.scheduling.chunked_prefill import ThroughputModel
from mlxstack.policy.scheduling.scheduler import SchedulerLimits, limits_of

log = logging.getLogger(__name__)


class PreparedModel(Struct, frozen=True):
    """A loaded model, and what the self-check says of it."""

    loaded: LoadedModel
    factory: CacheFactory
    check: BatchingCheck
    exact: ExactModel
    facts: ModelFacts
    """With the identity of its KV."""
    drafts: LoadedDrafts
    n_fixed_rope: int | None
    """Tokens up to which rotary embeddings do not depend on the length; None: never."""
    runner: ModelRunner
    """Runs passes of one context."""
    token_bytes: int
    """Bytes of KV per token."""
    checks: RememberedChecks


class EngineAssembly:
    """Loads one engine. MLX thread only, but for its constructor."""

    def __init__(
        self,
        preset: Preset,
        stores: EngineStores,
        parts: EngineParts,
        budget: MemoryBudget,
        remote: RemoteKV | None = None,
    ) -> None:
        self._preset = preset
        self._stores = stores
        self._parts = parts
        self._budget = budget
        self._remote = remote

    def load(self, thread: EngineThread) -> LoadedEngine:
        """Load the model and build its engine. Raises SetupError."""
        preset = self._preset
        model = self._load_model(thread)
        plan = self._plan(model, thread.device_memory)
        costs = self._costs(model)
        runner = self._parts.runner(model.loaded.model, model.check, model.drafts.target)
        runner.mode = model.exact.mode
        slot_kv = self._slot_kv(thread, model, plan, runner)
        limits = self._limits(model, plan)
        grouper: RowGrouper = NO_GROUPS
        if model.check.can_group:
            grouper = RowStacker(slot_kv.has_room)
        drafts = model.drafts.coordinator(runner, costs, limits.prefill)
        loop = EngineLoop(
            Batch(runner, drafts or NO_PROPOSALS, model.loaded.inputs, grouper),
            slot_kv,
            preset.slots.n_ctx,
            limits,
            plan.max_cached_bytes,
        )
        loop.facts = Snapshot(
            is_batching=model.check.is_batching and preset.batch.enabled,
            why_not_batching=None if model.check.is_batching else model.check.why_not,
            exact=model.exact.report,
        )
        loop.transforms.append(model.loaded.inputs.with_checkpoints)
        loop.answer_rules = loop_rule
        # The first requests too begin to decode together where a step is long.
        loop.stats.speed = ThroughputModel(decode_s=self._decode_s(model, costs))
        if self._remote is not None:
            remote = RemotePrefill(
                self._remote,
                thread.post,
                slot_kv.bytes_per_token,
                loop.stats.expected_s,
                lambda: len(loop.batch.rows),
            )
            loop.kv_providers.insert(0, remote)
        if drafts is not None:
            loop.idle_works.append(DraftPrefill(loop, drafts))
        if model.n_fixed_rope is not None:
            loop.transforms.append(partial(keyed_by_length, fixed=model.n_fixed_rope))
        if not model.check.is_batching:
            log.warning("decoding slot by slot: %s", model.check.why_not)
        thread.device_memory.wire(preset.device.wired, plan.planned_bytes)
        return LoadedEngine(
            facts=model.facts,
            tokenizer=model.loaded.tokenizer,
            loop=loop,
            idle=idle_wait(loop, preset, thread.publish, is_alone=self._parts.is_alone),
            disk_tier=slot_kv.disk_tier,
            actions=SlotActionRunner(loop, thread.publish),
            reporters=self._parts.reporters,
            features={EarlyPrefill: EarlyPrefill(loop)},
        )

    def _load_model(self, thread: EngineThread) -> PreparedModel:
        preset = self._preset
        progress = thread.load_progress
        loaded = self._parts.load(preset, progress)
        if self._parts.can_embed:
            loaded = with_images(loaded, preset.kv)
        n_fixed_rope = exact_ropes(loaded.model)
        loader.check_context(loaded.facts, preset.slots.n_ctx)
        factory = CacheFactory(loaded.model, preset.kv)
        thread.device_memory.apply()

        # Several ranks compute a check together, or none of them does.
        store = self._stores.checks if self._parts.is_alone else None
        checks = RememberedChecks(store, progress, self._parts.check_s, preset.kv)
        group_rows = stack_fully if self._parts.can_group else None
        checked = partial(checks.check, group_rows=group_rows)
        check = checked(loaded, factory)
        if is_uncertain(loaded.model, factory):
            why_not = why_not_copied(ModelRunner(loaded.model), factory, loaded.facts.n_vocab)
            factory.can_copy = why_not is None
            if why_not is not None:
                log.warning("every prompt is computed from its start: %s", why_not)
        # Its random KV is as long as the model's windows.
        device.release()
        exact = self._exact(loaded, factory, check, checks)
        if exact.mode is not None:
            check = replace(check, can_group=False, can_share=False)
            if self._preset.batch.exact is ExactBits.ON:
                # With `auto` a later load may choose otherwise, and has to find this KV.
                check = replace(check, kv=f"{check.kv}, equal bits")
        device.release()
        identity = self._parts.kv_identity(loaded.facts, check, preset)
        has_states = self._parts.has_hidden_states
        drafts = load_drafts(preset, loaded, check, checked, progress, has_states=has_states)
        runner = ModelRunner(loaded.model)
        runner.mode = exact.mode
        return PreparedModel(
            loaded=loaded,
            factory=factory,
            check=check,
            exact=exact,
            facts=replace(loaded.facts, identity=identity),
            drafts=drafts,
            n_fixed_rope=n_fixed_rope,
            runner=runner,
            token_bytes=kv_bytes_per_token(runner, factory),
            checks=checks,
        )

    def _exact(
        self,
        loaded: LoadedModel,
        factory: CacheFactory,
        check: BatchingCheck,
        checks: RememberedChecks,
    ) -> ExactModel:
        """Verdict on the bits of rows, logged."""
        preset = self._preset
        if not self._parts.can_be_exact:
            return ExactModel(ExactRows(reason="several machines compute the passes"))
        n_slots = min(preset.slots.count, preset.batch.max_size)
        plan = plan_of(preset.batch.exact, n_slots, check.rows)
        bits = checks.once(
            plan.name,
            loaded.facts,
            MeasuredBits,
            lambda: measure_bits(loaded.model, factory, loaded.facts.n_vocab, plan),
            lambda measured: measured.is_complete,
        )
        exact = exact_model(loaded.model, bits)
        is_wanted = preset.batch.exact is ExactBits.ON
        level = logging.WARNING if is_wanted and exact.mode is None else logging.INFO
        state = "on" if exact.mode is not None else "off"
        log.log(level, "equal bits of rows are %s: %s", state, exact.report.reason)
        return exact

    def _plan(self, model: PreparedModel, device_memory: DeviceMemory) -> MemoryPlan:
        facts = replace(model.facts, n_bytes=model.facts.n_bytes + model.drafts.n_bytes)
        plan = memory_plan(self._preset, facts, self._budget, device_memory.limits())
        is_measured = model.drafts.is_active
        return self._parts.agree(model.check, plan, model.token_bytes, is_measured=is_measured)

    def _costs(self, model: PreparedModel) -> WidthCosts:
        """Costs of passes by width, once experts are compiled where that pays."""
        n_slots = self._preset.slots.count
        is_drafting = model.drafts.is_active
        self._parts.compile(model.runner, model.factory, n_slots, is_drafting=is_drafting)
        if not is_drafting:
            return UNMEASURED
        return model.checks.once(
            "widths of passes" if model.exact.mode is None else "widths of passes with equal bits",
            model.loaded.facts,
            WidthCosts,
            lambda: measure_widths(model.runner, model.factory),
        )

    def _decode_s(self, model: PreparedModel, costs: WidthCosts) -> float:
        """Seconds of a decode step; 0 if unknown."""
        if costs is not UNMEASURED:
            return costs.seconds_at(1)
        # Several ranks would have to compute the pass together.
        if not self._parts.is_alone:
            return 0.0
        return pass_seconds(model.runner, model.factory, 1)

    def _slot_kv(
        self, thread: EngineThread, model: PreparedModel, plan: MemoryPlan, runner: ModelRunner
    ) -> SlotKVManager:
        parts = self._parts
        preset = self._preset
        factory = model.factory
        prefix_cache = parts.prefix_cache(
            model.facts.identity.key(), preset.prefix_cache, plan.kv_budget, factory.quantized_start
        )
        slots = parts.contexts(factory, preset.slots.count)
        disk_tier = DiskTier(
            parts.store(self._stores.kv),
            self._stores.slot_files,
            prefix_cache,
            parts.layouts(runner, factory),
            thread.post,
            self._stores.manifests,
        )
        disk_tier.open()
        slot_kv = SlotKVManager(
            slots,
            prefix_cache,
            disk_tier,
            BackgroundSteps(thread.post, lambda: thread.loaded.loop.batch.is_busy),
            preset.agents.persist,
            model.token_bytes + model.drafts.bytes_per_token,
            plan.array_limit,
        )
        slot_kv.inputs = model.loaded.inputs
        return slot_kv

    def _limits(self, model: PreparedModel, plan: MemoryPlan) -> SchedulerLimits:
        shared = NOT_SHARED
        if self._parts.can_share and model.check.can_share:
            shared = model.checks.once(
                "shared passes",
                model.loaded.facts,
                SharedPrompts,
                lambda: measure_sharing(model.runner, model.factory),
                lambda prompts: prompts.max_tokens > 0,
            )
            log.info("prompts of up to %d tokens share a pass", shared.max_tokens)
        attention = PrefillAttention(plan.score_bytes, max_score_bytes=plan.max_score_bytes)
        attention = self._parts.choose_kernels(model.runner, model.factory, attention)
        return limits_of(self._preset, plan.kv_budget, attention, shared)
