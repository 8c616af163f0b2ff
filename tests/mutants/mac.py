"""Protections for macOS, Metal and half precision, which this machine imitates."""

from tests.mutants.mutant import Mutant

BUFFERS = "tests/mac/test_buffer_cache.py::"
WIRED = "tests/mac/test_wired_limit.py::"
DEVICE = "tests/mac/test_device_errors.py::"
PRESSURE = "tests/mac/test_pressure.py::"
BUDGET = "tests/mac/test_device_budget.py::"
AHEAD = "tests/mac/test_step_ahead.py::"
LAUNCHD = "tests/mac/test_launchd.py::"
COMMAND_BUFFERS = "tests/mac/test_command_buffers.py::"
FORCED = "tests/mac/test_forced_kernels.py::"
COMPILED = "tests/mac/test_compiled_experts.py::"
SAMPLING = "tests/engine/test_sampling.py::"
CHECK = "tests/mac/test_self_check.py::"
KEEP_WARM = "tests/policy/test_keep_warm.py::"
NEIGHBORS = "tests/mac/test_neighbors.py::"
STORE = "tests/mac/test_store.py::"

MAC = (
    Mutant(
        "the planes of a file are evaluated at once", "engine/kv/segments.py",
        "    mx.eval(flat)\n    return tuple(", "    return tuple(",
        "tests/mac/test_planes.py::test_all_arrays_of_a_file_are_evaluated_at_once",
    ),
    Mutant(
        "restored KV may exceed 2 GiB per part", "engine/kv/slot_restore.py",
        "    base = unfilled(heads * room, n_row)", "    base = unfilled(heads * room * n_row)",
        "tests/engine/test_landing.py"
        "::test_buffers_have_two_dimensions",
    ),
    Mutant(
        "errors of connections name Local Network Privacy", "host/macos.py",
        "if is_local_network_refused(error):", "if False:",
        "tests/mac/test_system.py::test_errors_of_peers_and_machines_name_the_setting",
    ),
    Mutant(
        "a rank that is missing names Local Network Privacy", "engine/distributed/group.py",
        'if sys.platform == "darwin" else ""', 'if False else ""',
        "tests/mac/test_system.py::test_ranks_and_the_gateway_name_the_setting",
    ),
    Mutant(
        "a step of the clock changes no process", "host/process.py",
        "process._proc.create_time(monotonic=True)", "process.create_time()",
        "tests/mac/test_processes.py::test_a_process_lives_on_after_a_step_of_the_clock",
    ),
    Mutant(
        "names of running services differ by more than case", "host/services.py",
        "        if is_same_file and", "        if False and",
        "tests/mac/test_processes.py"
        "::test_a_name_that_differs_by_case_from_a_running_service_is_refused",
    ),
    Mutant(
        "KV on disk is not backed up", "store/kv_store.py",
        "        exclude_from_backups(root, sys.platform)", "        pass",
        "tests/mac/test_backup_exclusion.py::test_a_folder_of_kv_is_excluded",
    ),
    Mutant(
        "recurrent state of the same rows is not copied", "engine/model/row_views.py",
        "if stacked is not None and is_same:", "if False:",
        "tests/mac/test_dispatches.py"
        "::test_a_step_of_each_kind_of_model_stays_below_its_ceilings",
    ),
    Mutant(
        "recurrent state of another row is read anew", "engine/model/row_views.py",
        "own() is row for", "own() is not None for",
        "tests/engine/test_stacked_states.py::test_a_row_with_another_state_is_read_anew",
    ),
    Mutant(
        "a slow fused kernel is not forced", "policy/attention_kernels.py",
        "    return forced_s <= MAX_SLOWDOWN * default_s", "    return True",
        "tests/mac/test_forced_kernels.py::test_a_slow_fused_kernel_leaves_the_bound",
    ),
    Mutant(
        "the seam forces the fused kernel", "engine/decode/attention_patch.py",
        "if is_array and _is_forced(queries, values, mask):", "if False:",
        "tests/mac/test_forced_kernels.py"
        "::test_a_fused_kernel_that_is_fast_enough_is_forced_and_bounds_no_chunk",
    ),
    Mutant(
        "the room of KV is reserved once", "engine/model/cache_adapters.py",
        "return max(0, n_more) * sum(", "return 0 * sum(",
        BUFFERS + "test_kv_room_is_allocated_once_for_the_whole_prompt",
    ),
    Mutant(
        "buffers are freed after the last kernel", "engine/device.py",
        "    synchronize()\n    with LOADING:", "    with LOADING:",
        BUFFERS + "test_buffers_are_released_on_the_mlx_thread_after_the_step_in_flight",
    ),
    Mutant(
        "buffers are freed with no step in flight", "engine/loop.py",
        "        self._decode(self.batch.sync)\n        device.release()",
        "        device.release()",
        BUFFERS + "test_buffers_are_released_on_the_mlx_thread_after_the_step_in_flight",
    ),
    Mutant(
        "only the MLX thread frees buffers", "engine/device.py",
        "    gc.collect()\n    return int(mx.get_active_memory())",
        "    gc.collect()\n    mx.clear_cache()\n    return int(mx.get_active_memory())",
        BUFFERS + "test_buffers_are_released_on_the_mlx_thread_after_the_step_in_flight",
    ),
    Mutant(
        "the cache of freed buffers has a limit of MLX", "engine/device_memory.py",
        "mx.set_cache_limit(limits.cache_bytes),", "0,",
        WIRED + "test_limits_are_set_after_the_load_and_restored_after_the_last_kernel",
    ),
    Mutant(
        "KV is never wired", "engine/device_memory.py",
        "n_bytes = min(device.active_bytes(), working_set)", "n_bytes = working_set",
        WIRED + "test_an_engine_that_serves_changes_no_wired_set",
    ),
    Mutant(
        "weights are unwired before they are dropped", "engine/device_memory.py",
        "            mx.set_wired_limit(0)\n", "            pass\n",
        WIRED + "test_an_engine_that_serves_changes_no_wired_set",
    ),
    Mutant(
        "MLX's limit is the whole working set", "engine/device_memory.py",
        "mx.set_memory_limit(limits.working_set),", "mx.set_memory_limit(limits.array_bytes),",
        WIRED + "test_limits_are_set_after_the_load_and_restored_after_the_last_kernel",
    ),
    Mutant(
        "a service takes only what others have let go", "policy/memory/memory_shares.py",
        "    return max(0, min(budget, free_beside(own, neighbors, grants, ceiling)))",
        "    return budget",
        "tests/policy/test_memory_shares.py::"
        "test_services_that_come_and_go_in_any_order_never_exceed_the_ceiling",
    ),
    Mutant(
        "a service waits for room before it loads", "service/parts/neighbors.py",
        "        await asyncio.to_thread(self.reserve, preset)\n", "        pass\n",
        NEIGHBORS + "test_a_service_starts_with_its_share_after_it_has_waited_for_room",
    ),
    Mutant(
        "a service starts with its share", "service/parts/neighbors.py",
        "        await self.divide(preset, engine)\n", "        pass\n",
        NEIGHBORS + "test_a_service_starts_with_its_share_after_it_has_waited_for_room",
    ),
    Mutant(
        "no room is reserved before it is free", "service/parts/neighbors.py",
        "            if free >= budget:\n", "            if True:\n",
        NEIGHBORS + "test_a_new_service_waits_for_room_before_it_loads",
    ),
    Mutant(
        "KV counts until it is let go", "service/parts/neighbors.py",
        "            if budget > grants.get(self._name, 0):\n", "            if True:\n",
        NEIGHBORS + "test_a_new_service_waits_for_room_before_it_loads",
    ),
    Mutant(
        "two that load at once reserve their slots only", "service/parts/neighbors.py",
        "            budget = min(own.least - own.fixed, share)\n", "            budget = share\n",
        NEIGHBORS + "test_two_that_load_at_once_reserve_their_slots_only",
    ),
    Mutant(
        "services of a home divide its memory", "service/parts/neighbors.py",
        "self._claims = own, claims_in(self._home, memory, self._name), memory.usable",
        "self._claims = own, (), memory.usable",
        NEIGHBORS + "test_a_new_service_waits_for_room_before_it_loads",
    ),
    Mutant(
        "a device error costs all rows their KV", "engine/thread.py",
        "        loop.lose_kv(error)\n", "        loop.end_all(error)\n",
        DEVICE + "test_all_rows_fail_and_their_kv_is_dropped",
    ),
    Mutant(
        "a device that stays broken ends the engine", "engine/thread.py",
        "        if self._n_device_errors >= MAX_DEVICE_ERRORS:\n", "        if False:\n",
        DEVICE + "test_decode_steps_that_always_fail_end_the_engine_although_prompts_are_computed",
    ),
    Mutant(
        "a decoded token proves the device", "engine/thread.py",
        "            self._n_device_errors = 0\n\n", "            pass\n\n",
        DEVICE + "test_two_errors_with_an_answer_between_them_end_nothing",
    ),
    Mutant(
        "a device error of a load is no error of the setup", "engine/thread.py",
        "set_exception(device_error(error) or error)", "set_exception(error)",
        DEVICE + "test_an_error_while_the_model_loads_is_no_error_of_the_setup",
    ),
    Mutant(
        "stalls of a Linux overrule the share of memory", "host/memory_pressure.py",
        "else of_psi(_psi())", "else None",
        PRESSURE + "test_on_linux_the_stalls_of_the_kernel_alone_decide",
    ),
    Mutant(
        "room is made some layers at a time", "engine/kv/slot_context.py",
        "if n_bytes and n_made < AT_ONCE:", "if n_bytes:",
        "tests/engine/test_room.py::"
        "test_a_step_makes_room_in_some_layers_and_promises_the_rest",
    ),
    Mutant(
        "promised room is in use", "engine/slots/slot_kv_manager.py",
        "return int(mx.get_active_memory()) + promised", "return int(mx.get_active_memory())",
        BUDGET + "test_room_that_is_promised_to_a_prompt_is_not_given_to_another",
    ),
    Mutant(
        "the device bounds what is admitted", "engine/slots/slot_kv_manager.py",
        "return 0 < self.array_limit < self._held() + n_bytes", "return False",
        BUDGET + "test_a_prompt_is_refused_while_the_device_is_full_and_served_later",
    ),
    Mutant(
        "scores of attention bound a chunk", "engine/device_memory.py",
        "score_bytes=score_bytes(shape, kv_bits(preset)) if shape is not None else 0,",
        "score_bytes=0,",
        BUDGET + "test_scores_of_unfused_attention_bound_the_chunk",
    ),
    Mutant(
        "a preset lets a Mac sleep", "service/service.py",
        "preset.server.prevent_sleep", "True",
        "tests/mac/test_sleep.py::test_nothing_is_held_where_the_preset_says_so",
    ),
    Mutant(
        "each row has the tokens of its KV", "engine/decode/batch.py",
        "ahead = {id(taken.row) for taken in self.in_flight}",
        "ahead = {id(taken.row) for taken in self.in_flight if taken.choices}",
        AHEAD + "test_a_row_that_raises_has_as_many_tokens_as_its_kv",
    ),
    Mutant(
        "an end that was sampled comes before a fault of the next step", "engine/loop.py",
        "        for last in ended.values():\n"
        "            self._end(self._requests[last.request], last, deliver)\n"
        "        for row, reason in self.batch.take_broken():\n"
        "            self._break_slots([row.slot], reason)\n",
        "        for row, reason in self.batch.take_broken():\n"
        "            self._break_slots([row.slot], reason)\n"
        "        for last in ended.values():\n"
        "            self._end(self._requests[last.request], last, deliver)\n",
        AHEAD + "test_an_answer_that_ended_before_its_guide_raised_is_whole_and_kept",
    ),
    Mutant(
        "tokens and ends do not wait for the KV of a slot", "engine/loop.py",
        "            self._end(self._requests[last.request], last, deliver)\n",
        "            self._end(self._requests[last.request], last)\n",
        AHEAD + "test_tokens_and_ends_do_not_wait_for_the_kv_of_a_slot",
    ),
    Mutant(
        "launchd does not restart what cannot heal", "control/final_exit_codes.py",
        "if code in HOPELESS_CODES:", "if False:",
        LAUNCHD + "test_an_end_that_cannot_heal_is_a_success_under_launchd_only",
    ),
    Mutant(
        "an installation waits for the drain", "cli/commands/install.py",
        "    while _run(unit.probe) is None:\n", "    while False:\n",
        LAUNCHD + "test_installing_again_waits_until_the_old_job_has_drained",
    ),
    Mutant(
        "launchd allows more open files", "control/service_units.py",
        '        "SoftResourceLimits": {"NumberOfFiles": OPEN_FILES},\n', "",
        LAUNCHD + "test_the_property_list_has_what_a_service_needs",
    ),
    Mutant(
        "a log that launchd appends to is moved", "host/logs.py",
        "        os.truncate(path, 0)\n", "",
        LAUNCHD + "test_a_log_that_others_append_to_is_moved_when_it_is_large",
    ),
    Mutant(
        "rows with equal rules are one operation", "engine/decode/sampler.py",
        "groups[sampler.draw_rules].append(row)",
        "groups[replace(sampler.draw_rules, seed=start)].append(row)",
        SAMPLING + "test_rows_with_equal_rules_are_one_operation",
    ),
    Mutant(
        "top-k is a partition", "engine/decode/sampler.py",
        "ids = mx.sort(mx.argpartition(-logprobs, kth=k - 1, axis=-1)[:, :k], axis=-1)",
        "ids = mx.sort(mx.argsort(-logprobs, axis=-1)[:, :k], axis=-1)",
        SAMPLING + "test_no_rule_sorts_a_large_vocabulary",
    ),
    Mutant(
        "top-p sorts no large vocabulary", "engine/decode/sampler.py",
        "_least_by_sorting if is_sorted else _least_by_bits", "_least_by_sorting",
        SAMPLING + "test_no_rule_sorts_a_large_vocabulary",
    ),
    Mutant(
        "top-p sorts a large vocabulary on a GPU", "engine/decode/sampler.py",
        "is_sorted = has_gpu() or ", "is_sorted = ",
        SAMPLING + "test_top_p_of_a_large_vocabulary_takes_few_operations_on_a_gpu",
    ),
    Mutant(
        "processes that import MLX themselves get long command buffers", "engine/__init__.py",
        "os.environ.update(buffer_variables(os.environ))", "pass",
        COMMAND_BUFFERS + "test_the_limits_are_set_before_mlx_is_imported",
    ),
    Mutant(
        "an M5 keeps the command buffers of MLX", "host/command_buffers.py",
        "if generation is not None and", "if False and generation is not None and",
        COMMAND_BUFFERS + "test_an_m5_keeps_the_limits_of_mlx",
    ),
    Mutant(
        "plans count what command buffers keep", "policy/memory/capacity.py",
        "return n_bytes + scores + min(buffered_bytes, all_layers)", "return n_bytes + scores",
        COMMAND_BUFFERS + "test_the_workspace_grows_by_what_long_buffers_keep",
    ),
    Mutant(
        "models stay below the line at which MLX empties its cache", "host/hardware.py",
        "SHARE = 0.94", "SHARE = 1.0",
        BUDGET + "test_what_stays_is_below_the_line_at_which_mlx_empties_its_cache",
    ),
    Mutant(
        "threads of a worker on a GPU switch early", "api/server.py",
        "    if has_gpu():\n", "    if False:\n",
        "tests/mac/test_switch_interval.py::test_a_worker_on_a_gpu_switches_threads_early",
    ),
    Mutant(
        "a kernel that cannot be loaded is refused", "engine/decode/kernel_choice.py",
        "KERNEL_FAULTS = (ValueError, RuntimeError)", "KERNEL_FAULTS = (ValueError,)",
        FORCED + "test_a_kernel_that_cannot_be_loaded_is_not_forced",
    ),
    Mutant(
        "compiled blocks give the same bits", "engine/model/compiled_experts.py",
        " or not mx.array_equal(_bits(plain), _bits(compiled))", "",
        COMPILED + "test_a_pass_whose_compiled_bits_differ_is_not_compiled",
    ),
    Mutant(
        "blocks are compiled for a gain only", "engine/model/compiled_experts.py",
        "if gain >= MIN_GAIN:", "if gain > 0:",
        COMPILED + "test_only_passes_that_gain_enough_are_compiled",
    ),
    Mutant(
        "no kernel is forced in float32", "policy/attention_kernels.py",
        "dims in FORCIBLE_DIMS and is_half and", "dims in FORCIBLE_DIMS and",
        FORCED + "test_float32_is_neither_measured_nor_forced",
    ),
    Mutant(
        "a prompt begins again in an empty context", "engine/loop.py",
        "            context.clear()\n            request_state", "            request_state",
        FORCED + "test_a_prompt_begins_again_without_the_kernel_that_failed",
    ),
    Mutant(
        "log probabilities are float32", "engine/decode/sampler.py",
        "    logits = logits.astype(mx.float32)\n    logprobs = logits", "    logprobs = logits",
        SAMPLING + "test_logprobs_of_half_precision_logits_are_float32",
    ),
    Mutant(
        "rounding switches no batching off", "engine/decode/batching_check.py",
        "        if self.distance <= self.allowed:\n            return True\n",
        "        return self.distance <= TOLERANCES[mx.float32]\n",
        CHECK + "test_rounding_switches_no_batching_off",
    ),
    Mutant(
        "a fault in half precision is found", "engine/decode/batching_check.py",
        "return self.is_half and is_small and self.agreement >= MIN_AGREEMENT",
        "return self.is_half",
        CHECK + "test_a_fault_is_found_beneath_the_rounding",
    ),
    Mutant(
        "up warns of a verdict against batching", "cli/start_report.py",
        '"why_not_batching": props.why_not_batching', '"why_not_batching": None',
        "tests/cli/test_running_facts.py::"
        "test_a_verdict_against_batching_is_told_by_up_and_status",
    ),
    Mutant(
        "the dashboard tells a verdict against batching", "tui/views/overview.py",
        "    if not snapshot.is_batching:\n", "    if snapshot is None:\n",
        "tests/tui/test_views.py::test_a_verdict_against_batching_is_told",
    ),
    Mutant(
        "names that differ by case are one", "store/slot_files.py",
        "        if namesake.name != path.name and path not in existing:\n", "        if False:\n",
        STORE + "test_a_name_that_differs_by_case_only_is_refused",
    ),
    Mutant(
        "KV files cost barriers", "store/kv_store.py",
        "self.disk, is_durable=False)", "self.disk)",
        STORE + "test_kv_files_cost_barriers_and_a_batch_of_them_one_full_flush",
    ),
    Mutant(
        "memory of a Mac is its footprint", "host/process.py",
        'footprint = _footprint_bytes(pid) if sys.platform == "darwin" else None',
        "footprint = None",
        "tests/mac/test_footprint.py::test_a_mac_tells_the_physical_footprint",
    ),
    Mutant(
        "status tells that sleep is prevented", "client/types.py",
        "if self.prevents_sleep:", "if False:",
        "tests/mac/test_sleep.py::test_a_running_service_tells_it",
    ),
    Mutant(
        "a gateway takes no room beside its members", "planner/memory_room.py",
        "if services.is_gateway(state.spec):", "if False:",
        "tests/mac/test_neighbors.py::test_a_gateway_leaves_a_running_service_the_kv_of_its_slots",
    ),
    Mutant(
        "members that take turns claim the budget of their gateway", "planner/memory_room.py",
        "-excess, share=0", "0, share=0",
        NEIGHBORS + "test_members_of_a_gateway_that_take_turns_leave_a_service_the_kv_of_its_slots",
    ),
    Mutant(
        "a service that loads without room is counted", "service/parts/neighbors.py",
        "                self.hold(0)\n", "",
        NEIGHBORS + "test_a_service_that_loads_without_room_is_counted",
    ),
    Mutant(
        "memory is held for a model that was unloaded", "service/parts/neighbors.py",
        "if self._has_model and holder is not None:", "if holder is not None:",
        NEIGHBORS + "test_an_unloaded_model_holds_no_room",
    ),
    Mutant(
        "KV is updated in place", "engine/model/row_views.py",
        "            stored.append(slot.update_and_fetch(k, v))",
        "            slot.last = slot.keys[..., :1, :]\n"
        "            stored.append(slot.update_and_fetch(k, v))",
        "tests/mac/test_in_place.py::test_kv_buffers_stay_where_they_are",
    ),
    Mutant(
        "a worker with a model spawns the program that tells the GPU's limit",
        "host/hardware.py",
        "check=False, close_fds=False)", "check=False)",
        "tests/mac/test_spawning.py"
        "::test_the_program_that_tells_the_limit_of_the_gpus_memory",
    ),
    Mutant(
        "a keep-warm pass runs beside nothing", "policy/keep_warm.py",
        "if state.is_busy or state.answered_at is None:", "if state.answered_at is None:",
        KEEP_WARM + "test_nothing_is_computed_beside_a_request_or_before_the_first",
    ),
    Mutant(
        "a keep-warm pass waits for power", "policy/keep_warm.py",
        "    if not wait_s and not state.is_powered:", "    if False:",
        KEEP_WARM + "test_passes_of_any_time_line_are_powered_spaced_and_end",
    ),
    Mutant(
        "keep-warm passes end", "policy/keep_warm.py",
        "        return None\n    return wait_s", "        return wait_s\n    return wait_s",
        KEEP_WARM + "test_passes_of_any_time_line_are_powered_spaced_and_end",
    ),
    Mutant(
        "a message is read before a keep-warm pass", "engine/idle_wait.py",
        "is_asked=not inbox.empty()", "is_asked=False",
        "tests/mac/test_idle_work.py::test_a_message_is_read_before_a_pass_that_is_due",
    ),
    Mutant(
        "ranks make no keep-warm pass", "engine/idle_wait.py",
        "if has_gpu() and is_alone else", "if has_gpu() else",
        "tests/mac/test_idle_work.py::test_a_cpu_and_ranks_make_none",
    ),
    Mutant(
        "the version of macOS is the real one", "host/macos.py",
        "program_output(SYSTEM_VERSION, env=REAL_VERSION)", "program_output(SYSTEM_VERSION)",
        "tests/mac/test_conditions.py::test_the_version_of_macos_is_read_without_compatibility",
    ),
    Mutant(
        "an unloaded model holds no room", "service/parts/neighbors.py",
        "        await asyncio.to_thread(self.release)\n", "        pass\n",
        "tests/gateway/test_continuity.py::"
        "test_the_turns_of_an_agent_are_those_of_a_cold_conversation",
    ),
)  # fmt: skip
