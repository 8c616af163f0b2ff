"""Protections of requests, agents and memory that were added after an attack or an audit."""

from tests.mutants.mutant import Mutant

LOAD = "tests/api/test_load_trust.py::"
REPLAY = "tests/text/test_replay.py::"
CONNECTIONS = "tests/api/test_connection_limits.py::"
SLOTS = "tests/engine/test_conversations_and_slots.py::"
RELEASES = "tests/store/test_other_releases.py::"
SWAPS = "tests/api/test_swap_limits.py::"

LIMITS = (
    Mutant(
        "certificates are checked", "client/client.py",
        "verify=False if is_plain else httpx.create_ssl_context(),", "verify=False,",
        "tests/cli/test_client.py::test_certificates_are_checked_wherever_there_is_tls",
    ),
    Mutant(
        "a client names no preset file", "service/engine_factory.py",
        "if name not in listed or presets.is_path(name):", "if not name:",
        LOAD + "test_a_client_cannot_run_code_with_a_preset_of_its_own",
    ),
    Mutant(
        "nor a folder", "service/engine_factory.py",
        "if not HUB_ID.fullmatch(model) or Path(model).exists():", "if not model:",
        LOAD + "test_a_client_cannot_name_a_folder_as_the_model",
    ),
    Mutant(
        "nor a handover of its own", "service/engine_factory.py",
        "if not HANDOVER_ID.fullmatch(handover_id):", "if not handover_id:",
        LOAD + "test_a_client_cannot_guess_a_handover",
    ),
    Mutant(
        "tokens of an unloaded model are refused", "service/service.py",
        "        if text_processor is not self._loaded_model.text_processor:\n"
        "            raise Busy(CHANGED)",
        "        pass",
        "tests/api/test_swap_race.py::"
        "test_requests_that_are_being_prepared_are_refused_after_a_swap",
    ),
    Mutant(
        "a template must end before the old model goes", "service/engine_factory.py",
        "        check_template(path)\n", "",
        SWAPS + "test_a_template_that_does_not_end_is_refused_before_the_old_model_goes",
    ),
    Mutant(
        "a replayed call stays in its conversation", "text/prompt/answer_replay.py",
        "entry = self.get((scope, calls[index].id))",
        "entry = next((e for k, e in self._entries.items() if k[1] == calls[index].id), None)",
        REPLAY + "test_redteam_8_a_call_stays_with_its_tenant_and_conversation",
    ),
    Mutant(
        "only an equal call is replayed", "text/prompt/answer_replay.py",
        "return entry.calls == tuple(digest_of(call) for call in calls)",
        "return len(entry.calls) == len(calls)",
        REPLAY + "test_only_an_equal_call_is_replayed",
    ),
    Mutant(
        "words that a call does not mean are not replayed", "text/prompt/splices.py",
        "return self._terms(sampled) <= self._terms(written.tokens)", "return True",
        REPLAY + "test_words_that_the_call_does_not_mean_are_not_replayed",
    ),
    Mutant(
        "special tokens inside a call are compared", "text/prompt/splices.py",
        "if self._marks(sampled) != self._marks(written.tokens):", "if not sampled:",
        REPLAY + "test_a_sampled_special_token_opens_no_turn",
    ),
    Mutant(
        "a prompt that a sentinel changes is left alone", "text/prompt/splices.py",
        "if probe is None or probe.text != marked:", "if probe is None:",
        REPLAY + "test_a_prompt_that_a_sentinel_would_change_is_left_alone",
    ),
    Mutant(
        "replayed calls take a bounded room", "text/prompt/answer_replay.py",
        "while self.n_bytes > self._max:", "while False:",
        REPLAY + "test_blocks_take_a_bounded_room",
    ),
    Mutant(
        "multiples are bounded", "text/grammar/grammar_check.py",
        "if units > MAX_MULTIPLE:", "if units < 0:",
        "tests/text/test_grammar_check.py::test_a_multiple_of_many_digits_is_refused",
    ),
    Mutant(
        "grammars take a bounded room", "text/grammar/compiler.py",
        " or self.n_bytes > MAX_BYTES:", ":",
        "tests/text/test_grammar_check.py::test_kept_grammars_are_bounded_by_bytes",
    ),
    Mutant(
        "idle connections make room", "api/connection_limits.py",
        " and not self._close_longest_waiting():", ":",
        CONNECTIONS + "test_idle_connections_make_room_for_new_ones",
    ),
    Mutant(
        "a head has a time limit", "api/connection_limits.py",
        "            self._start_deadline(HEAD, HEAD_S)\n", "            pass\n",
        CONNECTIONS + "test_a_head_has_a_time_limit_and_an_answer_has_none",
    ),
    Mutant(
        "a body has a time limit", "api/connection_limits.py",
        "            self._start_deadline(BODY, BODY_S)\n", "            pass\n",
        CONNECTIONS + "test_a_body_has_a_time_limit",
    ),
    Mutant(
        "connections leave descriptors for files", "api/connection_limits.py",
        "int(soft * SHARE_OF_DESCRIPTORS)", "soft",
        CONNECTIONS + "test_the_limit_leaves_descriptors_for_files",
    ),
    Mutant(
        "names of containers count from near peers only", "api/host_rules.py",
        "return (mapped or address).is_private", "return True",
        "tests/api/test_guards.py::test_names_of_this_machine",
    ),
    Mutant(
        "an import does not lower the limit of open files", "host/descriptors.py",
        "(soft, hard))\n    raise_soft_limit()\n", "(soft, hard))\n",
        "tests/host/test_descriptors.py::test_the_import_of_mlx_lm_does_not_lower_the_limit",
    ),
    Mutant(
        "no temperature overflows", "engine/decode/sampler.py",
        "        return 0.0\n    return min(temperature, MAX_TEMPERATURE)",
        "        return temperature\n    return temperature",
        "tests/engine/test_temperatures.py::"
        "test_below_the_least_temperature_sampling_is_greedy",
    ),
    Mutant(
        "no bias overflows", "engine/decode/sampler.py",
        "{token: min(bias, MAX_BIAS) for token, bias in s.logit_bias}", "dict(s.logit_bias)",
        "tests/engine/test_temperatures.py::test_a_bias_of_any_size_chooses_its_token",
    ),
    Mutant(
        "states hold no padding of drafts", "engine/decode/batching_check.py",
        "t[: i + 1] if begins else t[i + 1 :]", "t if begins else []",
        "tests/matrix/test_self_check.py::"
        "test_rows_of_different_length_leave_no_padding_in_states",
    ),
    Mutant(
        "only a follow-up takes a used slot", "policy/scheduling/scheduler.py",
        "slack = min(SLACK, n_prompt // 4) if is_known else 0", "slack = SLACK",
        SLOTS + "test_b5_new_conversations_of_one_system_prompt_take_empty_slots",
    ),
    Mutant(
        "a plan keeps its checkpoint", "engine/kv/slot_context.py",
        "del self.checkpoints[2 if self.checkpoints[1].position == spared else 1]",
        "del self.checkpoints[1]",
        "tests/engine/test_going_back.py::test_a_conversation_goes_back_to_each_checkpoint_it_has",
    ),
    Mutant(
        "the code of a model is part of its KV's identity", "engine/loading/loader.py",
        r'digest.update(str(file.relative_to(path)).encode() + b"\0" + _bytes_digest(file))',
        "pass",
        "tests/engine/test_identity.py::test_d17_the_code_of_a_model_and_its_settings_shape_the_identity",
    ),
    Mutant(
        "KV of another release is not set aside", "store/kv_store.py",
        "    except UnknownVersion:\n        raise\n",
        "    except ZeroDivisionError:\n        raise\n",
        RELEASES + "test_c8_kv_of_another_version_is_a_miss_and_left_as_it_is",
    ),
    Mutant(
        "KV that a foreign manifest may name is spared", "store/gc.py",
        "retained |= {c.path for c, identity in saved if identity is not None}",
        "retained = set()",
        RELEASES
        + "test_c14_a_context_of_another_version_is_spared_with_the_kv_of_its_identity",
    ),
    Mutant(
        "turns of two services exclude each other", "store/agent_history.py",
        "fcntl.flock(fd, lock_mode | fcntl.LOCK_NB)", "pass",
        "tests/api/test_two_services.py::test_a_turn_in_one_service_refuses_those_of_the_other",
    ),
    Mutant(
        "a save replaces slot files only", "store/slot_files.py",
        "if os.path.lexists(path) and not begins_with(path, MAGIC, self._disk):", "if False:",
        "tests/store/test_shelf.py::test_another_kind_of_file_is_never_replaced",
    ),
    Mutant(
        "freed buffers are bounded", "engine/loop.py",
        "if mx.get_cache_memory() > self.max_cached_bytes:", "if False:",
        "tests/mac/test_buffer_cache.py::"
        "test_cached_buffers_stay_within_the_workspace_of_one_chunk",
    ),
    Mutant(
        "parked KV is written while the engine is idle", "engine/slots/slot_kv_manager.py",
        "self._write(context, indexed, is_deferred=True)", "self._write(context, indexed)",
        "tests/engine/test_writing.py::"
        "test_parked_kv_is_written_while_the_engine_is_idle",
    ),
    Mutant(
        "parked KV does not wait for ever", "engine/kv/write_queue.py",
        "        if is_busy:\n            self._submit_due()",
        "        if is_busy:\n            pass",
        "tests/engine/test_writing.py::"
        "test_parked_kv_is_written_while_the_engine_is_idle",
    ),
    Mutant(
        "idle threads of OpenBLAS sleep", "host/hardware.py",
        'if system != "Linux" or SLEEP_AFTER in env:', "if True:",
        "tests/host/test_this_machine.py::"
        "test_idle_blas_threads_sleep_unless_the_user_set_when",
    ),
    Mutant(
        "the kernel's pressure overrules the share of memory", "host/memory_pressure.py",
        "if level is None:", "if True:",
        "tests/mac/test_pressure.py::test_on_a_mac_the_level_of_the_kernel_alone_decides",
    ),
    Mutant(
        "a Mac stays awake while requests run", "host/sleep.py",
        "        self._n_requests += 1\n        self._acquire()", "        self._n_requests += 1",
        "tests/mac/test_sleep.py::test_the_assertion_is_held_iff_requests_run",
    ),
    Mutant(
        "KV fits the device beside the weights", "engine/device_memory.py",
        "kv_budget=left if share is None else min(share, left),",
        "kv_budget=left if share is None else share,",
        "tests/mac/test_device_budget.py::test_the_budget_is_what_the_planner_leaves_for_kv",
    ),
    Mutant(
        "a member whose supervisor is killed in its load starts again", "gateway/processes.py",
        "if has_no_end and not self.is_running and not self._why_ended():", "if False:",
        "tests/gateway/test_killed_supervisor.py",
    ),
    Mutant(
        "newcomers begin to decode together", "policy/scheduling/chunked_prefill.py",
        "if not (is_slow and computed) or", "if True or",
        "tests/engine/test_newcomers.py::test_newcomers_begin_to_decode_in_one_step",
    ),
    Mutant(
        "a long prompt keeps no newcomer waiting", "policy/scheduling/chunked_prefill.py",
        "        and prefill_s(speed, slot.position, slot.n_left) <= TOGETHER_S\n", "",
        "tests/policy/test_newcomers.py::test_a_long_prompt_is_not_waited_for",
    ),
    Mutant(
        "a request that decodes waits for no newcomer", "policy/scheduling/chunked_prefill.py",
        " or any(slot.has_token for slot in computed):", ":",
        "tests/policy/test_newcomers.py::"
        "test_newcomers_beside_a_decoding_request_go_one_by_one",
    ),
    Mutant(
        "newcomers wait where a step is slow", "policy/scheduling/chunked_prefill.py",
        "is_slow = 4 * speed.decode_s > HEADROOM * policy.max_stall_s", "is_slow = True",
        "tests/policy/test_newcomers.py::"
        "test_newcomers_begin_to_decode_together_where_a_step_is_slow",
    ),
    Mutant(
        "a slow client holds nothing of others", "api/connection_limits.py",
        'if self.scope is None or self.scope["method"] != "POST":', "if True:",
        "tests/api/test_slow_readers.py::"
        "test_a_request_is_over_with_its_last_token_and_the_answer_stays_whole",
    ),
    Mutant(
        "answers that wait for clients are bounded", "api/connection_limits.py",
        "if n_unread > MAX_UNREAD_BYTES and WAIT not in self._timers:", "if False:",
        "tests/api/test_slow_readers.py::test_answers_that_wait_are_bounded",
    ),
    Mutant(
        "a history is bounded", "service/calls/admission.py",
        "agents.check_history(caller.agent, conversation)", "pass",
        "tests/api/test_agent_images.py::test_a_history_is_bounded_in_every_dialect",
    ),
    Mutant(
        "an image of a history is written once", "store/agent_history.py",
        "if data is None or n_there == len(data):", "if data is None:",
        "tests/store/test_agent_folders.py::"
        "test_an_image_is_stored_once_and_goes_with_its_last_name",
    ),
    Mutant(
        "a key for some models has no agents of others", "gateway/app.py",
        "if holder is not None and holder.models:", "if False:",
        "tests/gateway/test_any_model.py::test_a_key_for_some_models_has_no_agents_of_others",
    ),
    Mutant(
        "dashboards of browsers are bounded", "cli/web_dashboard.py",
        "if self._n_dashboards >= MAX_DASHBOARDS:", "if False:",
        "tests/tui/test_web.py::test_dashboards_of_browsers_are_bounded_in_number_and_size",
    ),
    Mutant(
        "a closed pipe ends no start", "cli/streams.py",
        "if _n_changes:", "if False:",
        "tests/cli/test_streams.py::test_a_start_goes_on_where_nothing_reads_its_output",
    ),
    Mutant(
        "commands print no control codes of names", "cli/output.py",
        "typer.echo(printable_lines(text), nl=nl)", "typer.echo(text, nl=nl)",
        "tests/cli/test_streams.py::test_a_name_turns_no_terminal",
    ),
)  # fmt: skip
