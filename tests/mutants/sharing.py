"""Protections of draft models, shared prefixes, early turns, the gateway and downloads."""

from tests.mutants.mutant import Mutant

SHARING = (
    Mutant(
        "refused tokens leave the draft model", "engine/decode/draft_coordinator.py",
        "row.context.companion.rewind(len(row.context) + len(row.rolled_back))", "pass",
        "tests/engine/test_draft_model.py::test_refused_tokens_leave_no_trace_in_its_context",
    ),
    Mutant(
        "a draft model costs little", "policy/drafts/draft_model_governor.py",
        "LOSS_SHARE = 0.01", "LOSS_SHARE = 0.1",
        "tests/policy/test_draft_model_governor.py::test_no_draft_model_costs_two_percent",
    ),
    Mutant(
        "drafts give way to memory pressure", "engine/admin.py",
        "loop.slot_kv.drop_copies()", "pass",
        "tests/engine/test_draft_model.py::"
        "test_its_contexts_are_counted_and_begin_as_the_slots_do",
    ),
    Mutant(
        "a draft model has the same vocabulary", "engine/draft_loading.py",
        "if by_id.get(token_id, token) != token:", "if False:",
        "tests/engine/test_draft_model.py::"
        "test_other_vocabularies_missing_models_and_unfit_targets_are_refused",
    ),
    Mutant(
        "tiles of queries see their own tokens", "engine/model/cpu_attention.py",
        "mx.arange(n_seen) <= mx.arange(", "mx.arange(n_seen) < mx.arange(",
        "tests/engine/test_attention_on_a_cpu.py::"
        "test_tiles_of_many_queries_are_as_exact_as_mlx",
    ),
    Mutant(
        "masked scores have no exponentials", "engine/model/cpu_attention.py",
        "whole = mx.maximum(exponents, MIN_EXPONENT)", "whole = exponents",
        "tests/engine/test_attention_on_a_cpu.py::test_exponentials_are_those_of_numpy",
    ),
    Mutant(
        "parked branches inside a block are found", "engine/kv/prefix_cache.py",
        "if start <= reached[key]:", "if False:",
        "tests/engine/test_memory.py::"
        "test_d2_parked_branches_inside_one_block_are_found_to_the_token",
    ),
    Mutant(
        "the end of results is replayed", "text/prompt/replay.py",
        "if end == len(prompt.marked):", "if False:",
        "tests/text/test_answer_replay.py::"
        "test_the_end_of_the_results_comes_back_with_the_answer",
    ),
    Mutant(
        "text beside a call keeps its place", "text/template/capabilities.py",
        'TOLD = ("sxtext1", "sxresult1")', "TOLD = ()",
        "tests/text/test_template_traits.py::"
        "test_text_beside_a_call_comes_before_it_where_the_template_writes_it_after_the_result",
    ),
    Mutant(
        "a free call follows its schema", "text/grammar/constraint.py",
        "CallState(calls, layout.before)", "CallState(calls)",
        "tests/text/test_free_calls.py::test_calls_of_any_schema_are_valid_and_none_is_none",
    ),
    Mutant(
        "the path that was left goes first", "policy/kv/retention.py",
        "end_of(node.record) > position", "False",
        "tests/engine/test_early_turns.py::test_the_path_that_was_left_is_the_first_to_go",
    ),
    Mutant(
        "a warm Mac begins nothing early", "host/spare_power.py",
        "return bool(level)", "return False",
        "tests/host/test_spare_power.py::test_a_warm_mac_has_none",
    ),
    Mutant(
        "a new agent is trusted as its client", "policy/scheduling/early_history.py",
        "EarlyHistory(client.began, 0, client.n_wasted)", "EarlyHistory()",
        "tests/policy/test_early_turns.py::test_a_new_agent_is_trusted_as_its_client_is",
    ),
    Mutant(
        "early turns are noted per client", "engine/early_prefill.py",
        "if request.caller.client:", "if False:",
        "tests/engine/test_early_turns.py::"
        "test_a_new_agent_of_a_client_that_never_matches_is_left_alone",
    ),
    Mutant(
        "verify misses no absent reuse", "cli/verification/identity.py",
        "if not is_reused or not is_there:", "if False:",
        "tests/cli/test_verify.py::test_a_planted_fault_is_found",
    ),
    Mutant(
        "the gateway checks the Host", "gateway/app.py",
        "self._check_host(headers, peer)", "pass",
        "tests/gateway/test_gateway.py::test_foreign_hosts_and_pages_are_refused",
    ),
    Mutant(
        "a key of some models opens no other at a gateway", "gateway/app.py",
        "guards.check_model(holder, member.spec.all_names)", "pass",
        "tests/gateway/test_any_model.py::test_a_key_opens_only_the_models_that_it_names",
    ),
    Mutant(
        "nor at a service", "api/guards.py",
        "            if names is not None:", "            if False:",
        "tests/api/test_key_models.py::test_a_key_of_other_models_generates_nothing",
    ),
    Mutant(
        "a key of some models changes none", "api/guards.py",
        "    if key.models:\n", "    if False:\n",
        "tests/api/test_key_models.py::test_a_key_of_some_models_does_not_change_the_model",
    ),
    Mutant(
        "the process of an unloaded model of many ends", "gateway/members.py",
        "        if self.spec.stops:\n            await self.process.stop()",
        "        if False:\n            await self.process.stop()",
        "tests/gateway/test_any_model.py::test_three_clients_switch_between_twelve_models",
    ),
    Mutant(
        "keys of clients end at the gateway", "gateway/upstream.py",
        "and name not in KEYS", "",
        "tests/gateway/test_gateway.py::test_a_key_of_some_agents_stays_one",
    ),
    Mutant(
        "a loaded member lingers", "policy/residency.py",
        "if member.loaded_at + linger_s <= now:", "if True:",
        "tests/policy/test_residency.py::test_a_member_stays_for_its_linger",
    ),
    Mutant(
        "a busy member stays", "policy/residency.py",
        "if not victim.n_active}", "}",
        "tests/policy/test_residency.py::"
        "test_a_busy_member_is_closed_and_stays_until_its_requests_end",
    ),
    Mutant(
        "members have to fit", "control/gateway.py",
        "if resident + largest > budget:", "if False:",
        "tests/cli/test_gateway.py::test_members_that_never_fit_are_refused",
    ),
    Mutant(
        "a downloaded file has its hash", "models/weight_download.py",
        "== file.blob.name", '!= ""',
        "tests/cli/test_pull.py::test_a_part_that_is_damaged_is_never_taken_for_the_file",
    ),
    Mutant(
        "a download goes on inside a file", "models/weight_download.py",
        "resume_size=min(part.tell(), file.n_here)", "resume_size=0",
        "tests/cli/test_pull.py::test_pull_goes_on_after_kill_9",
    ),
    Mutant(
        "a changed row is drawn alone", "tui/widgets/table.py",
        "self.refresh_row(place)", "self.refresh()",
        "tests/tui/test_behaviour.py::test_a_row_that_changes_is_drawn_alone",
    ),
    Mutant(
        "an early turn is a state", "tui/views/overview.py",
        "if view.n_early:", "if False:",
        "tests/tui/test_views.py::test_a_turn_begun_early_is_a_state_of_its_own",
    ),
    Mutant(
        "a step with drafts has a bound", "policy/drafts/ngram_draft_governor.py",
        "seconds <= min(bounds.most_s, *allowed)", "seconds <= min(allowed)",
        "tests/policy/test_draft_bounds.py::"
        "test_a_step_with_drafts_stays_within_its_bound_and_delays_no_row_by_more_than_its_lead",
    ),
    Mutant(
        "drafts delay no other row", "policy/drafts/ngram_draft_governor.py",
        "seconds <= min(bounds.most_s, *allowed)", "seconds <= bounds.most_s",
        "tests/policy/test_draft_bounds.py::"
        "test_a_step_with_drafts_stays_within_its_bound_and_delays_no_row_by_more_than_its_lead",
    ),
    Mutant(
        "a rank compares its contexts", "engine/distributed/follower.py",
        "if digest_of(contexts) != digest:", "if False:",
        "tests/engine/test_ranks.py::"
        "test_a_rank_that_stands_elsewhere_carries_out_nothing",
    ),
    Mutant(
        "a rank holds a file for every read", "engine/distributed/disk.py",
        "self._files.setdefault(key, []).append(file)", "self._files[key] = [file]",
        "tests/engine/test_ranks.py::test_overlapping_reads_of_a_file_are_loaded_on_both_ranks",
    ),
    Mutant(
        "a rank waits for what is kept of a draft", "engine/distributed/follower.py",
        "if not context.is_in_proposal:", "if True:",
        "tests/engine/test_ranks.py::test_drafts_are_accepted_and_rolled_back_on_both",
    ),
    Mutant(
        "refused tokens leave no pair of an MTP head", "engine/decode/mtp_drafter.py",
        "pairs.trim(n_tokens - 1)", "pass",
        "tests/engine/test_mtp.py::test_drafts_are_what_the_head_predicts",
    ),
    Mutant(
        "pairs of an MTP head are consecutive", "engine/decode/mtp_drafter.py",
        "if isinstance(pairs, MTPContext) and pairs.end == position - 1:", "if False:",
        "tests/engine/test_mtp.py::test_an_edited_prompt_keeps_the_pairs_before_the_edit",
    ),
    Mutant(
        "the last state of an answer waits for its token", "engine/decode/mtp_drafter.py",
        "self.open = waiting[0][0] if is_known else None", "self.open = None",
        "tests/engine/test_mtp.py::"
        "test_a_next_turn_in_its_slot_goes_on_with_all_pairs",
    ),
    Mutant(
        "a head belongs to all of its model's output", "engine/model/mtp_head.py",
        "if mx.allclose(whole, ours, rtol=1e-3, atol=1e-3).item():", "if True:",
        "tests/engine/test_mtp.py::test_models_that_are_more_than_their_parts_have_no_head",
    ),
    Mutant(
        "plan counts an MTP head", "planner/candidate.py",
        ".plus(self.head)", "",
        "tests/engine/test_mtp.py::test_the_plan_counts_the_head_that_is_loaded",
    ),
    Mutant(
        "tensors of two models are not mixed", "models/model_files.py",
        "if SINGLE in present and shards and SINGLE not in shards:", "if False:",
        "tests/host/test_models.py::test_a_whole_file_beside_shards_is_refused",
    ),
    Mutant(
        "files of macOS beside weights are no weights", "models/model_files.py",
        "{beginning or '[!.]'}*.safetensors", "{beginning}*.safetensors",
        "tests/host/test_models.py::test_files_of_macos_beside_the_weights_are_no_weights",
    ),
    Mutant(
        "a long chunk is approached in steps", "policy/scheduling/chunked_prefill.py",
        "GROWTH = 2", "GROWTH = 100",
        "tests/policy/test_pacing.py::"
        "test_beside_decoders_a_chunk_is_at_most_twice_as_long_as_any_before",
    ),
    Mutant(
        "a rank discards what is not used", "engine/distributed/follower.py",
        "                self._disk.take(key)\n            case wire.Drop",
        "                pass\n            case wire.Drop",
        "tests/engine/test_ranks.py::test_a_rank_holds_a_file_for_every_read",
    ),
    Mutant(
        "a member unloads itself", "gateway/members.py",
        "if is_idle and status == MemberPhase.UNLOADED:", "if False:",
        "tests/gateway/test_idle.py::"
        "test_a_member_that_unloads_itself_frees_its_reservation",
    ),
    Mutant(
        "a closed address of a member keeps no connection", "gateway/upstream.py",
        "if len(self._kept) < MAX_KEPT and not self._is_closed:",
        "if len(self._kept) < MAX_KEPT:",
        "tests/gateway/test_upstream.py::"
        "test_a_request_that_outlives_its_upstream_leaves_no_connection",
    ),
    Mutant(
        "ranks compare every kind of layer", "engine/distributed/wire.py",
        'kv=";".join(kinds)', "kv=check.kv",
        "tests/engine/test_ranks.py::"
        "test_a_restart_finds_the_kv_on_the_disks_of_both",
    ),
    Mutant(
        "each stage of a pipeline has every kind of layer", "policy/memory/capacity.py",
        "if any(set(kinds[part.start : part.stop]) != set(kinds) for part in parts):", "if False:",
        "tests/policy/test_geometry.py::"
        "test_a_rank_without_a_layer_of_every_kind_is_refused",
    ),
    Mutant(
        "bytes of a token on other ranks count", "engine/distributed/group.py",
        "if rank_memory.bytes_per_token > bytes_per_token:", "if False:",
        "tests/engine/test_ranks.py::"
        "test_the_rank_with_the_least_room_bounds_the_kv_of_all",
    ),
    Mutant(
        "doctor compares the clocks of machines", "cli/doctor_hosts.py",
        "warn_if(abs(ahead_s) > MAX_CLOCK_S,", "warn_if(False,",
        "tests/cli/test_doctor_hosts.py::test_what_differs_there_is_told",
    ),
    Mutant(
        "doctor compares model code of machines", "cli/doctor_hosts.py",
        "if own == theirs:", "if own.weights == theirs.weights:",
        "tests/cli/test_doctor_hosts.py::test_other_files_and_other_code_are_told",
    ),
    Mutant(
        "stacked rows see no padding", "engine/decode/row_stack.py",
        "first = [max(padding, least) for padding in self._paddings]", "first = [least]",
        "tests/engine/test_row_stacks.py::test_stacked_rows_get_the_tokens_of_each_alone",
    ),
    Mutant(
        "a stack gives its tokens back", "engine/decode/row_stack.py",
        "                layer.write_back()", "                pass",
        "tests/engine/test_row_stacks.py::test_stacked_rows_get_the_tokens_of_each_alone",
    ),
    Mutant(
        "a stack has what rows decoded while it was built", "engine/decode/row_stack.py",
        "                layer.catch_up()", "                pass",
        "tests/engine/test_row_stacks.py::test_stacked_rows_get_the_tokens_of_each_alone",
    ),
    Mutant(
        "a stack counts as live KV", "engine/kv/slot_context.py",
        "(self._lent_to.n_row_bytes if self._lent_to is not None else 0)", "0",
        "tests/engine/test_row_stacks.py::test_a_stack_counts_and_is_freed",
    ),
    Mutant(
        "a stack needs room in the budget", "engine/decode/row_stack.py",
        "if not self._has_room(stack.n_bytes):", "if False:",
        "tests/engine/test_row_stacks.py::"
        "test_neither_uneven_rows_nor_those_without_room_are_stacked",
    ),
    Mutant(
        "stacks give way to memory pressure", "engine/slots/slot_kv_manager.py",
        "            context.take_back()", "            pass",
        "tests/engine/test_row_stacks.py::test_stacks_give_way_to_memory_pressure",
    ),
    Mutant(
        "the check at load decides about stacks", "engine/assembly.py",
        "if model.check.can_group:", "if True:",
        "tests/engine/test_row_stacks.py::"
        "test_an_engine_stacks_no_model_that_fails_the_check",
    ),
    Mutant(
        "logits belong to the whole prompt", "engine/kv/slot_context.py",
        "            or self.tokens[n - 1 : n] != [tokens[-1]]\n", "",
        "tests/engine/test_repeated_prompts.py::test_logits_belong_to_the_whole_prompt",
    ),
    Mutant(
        "logits go with the tokens", "engine/kv/slot_context.py",
        "if self._prompt_logits is not None and position < self._prompt_logits.n_tokens:",
        "if False:",
        "tests/engine/test_repeated_prompts.py::test_logits_go_with_the_tokens",
    ),
)  # fmt: skip
