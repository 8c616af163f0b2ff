"""Protections of drafts, early turns, idle models, downloads and the dashboard in a browser."""

from tests.mutants.mutant import Mutant

FEATURES = (
    Mutant(
        "an early turn gives way to whatever waits", "policy/scheduling/scheduler.py",
        " and not (state.waiting or state.actions)", "",
        "tests/policy/test_early_turns.py::test_whatever_waits_goes_first",
    ),
    Mutant(
        "an early turn rests beside decoding requests", "policy/scheduling/early_turns.py",
        "queue.n_rested < REST_STEPS", "False",
        "tests/policy/test_early_turns.py::"
        "test_decoding_requests_are_stalled_in_one_step_of_a_hundred",
    ),
    Mutant(
        "wasted early turns end", "policy/scheduling/early_history.py",
        "history.n_wasted < MAX_WASTED", "True",
        "tests/policy/test_early_turns.py::"
        "test_an_agent_whose_early_turns_are_wasted_gets_one_an_hour",
    ),
    Mutant(
        "only the first choice has an early turn", "service/calls/generation.py",
        " or generation.is_copy", "",
        "tests/service/test_early_turns.py::test_an_answer_that_is_not_kept_is_not_followed",
    ),
    Mutant(
        "an early turn ends under memory pressure", "engine/admin.py",
        "is not MemoryPressure.CALM", "is None",
        "tests/engine/test_early_turns.py::"
        "test_it_ends_under_memory_pressure",
    ),
    Mutant(
        "a request wakes an unloaded model", "service/parts/gate.py",
        "self.wanted.set()", "pass",
        "tests/api/test_idle_unload.py::test_an_agent_goes_on_as_if_nothing_had_been",
    ),
    Mutant(
        "a model that is gone fails who waits for it", "service/calls/idle_unload.py",
        "service.gate.interrupt(Broken(reason))", "pass",
        "tests/api/test_idle_unload.py::"
        "test_a_model_that_is_gone_fails_the_request_and_comes_back",
    ),
    Mutant(
        "one request may wait for an unloaded model", "api/swap_middleware.py",
        "max(service.preset.queue.max_waiting, 1)", "service.preset.queue.max_waiting",
        "tests/api/test_idle_unload.py::test_an_embedding_model_is_unloaded_too",
    ),
    Mutant(
        "a heartbeat of Ollama's streams is no empty line", "api/error_bodies.py",
        'OLLAMA_HEARTBEAT = b" "', 'OLLAMA_HEARTBEAT = b"\\n"',
        "tests/api/test_idle_unload.py::test_requests_wait_with_heartbeats_in_their_dialect",
    ),
    Mutant(
        "drafts are within the room of the device", "engine/loop.py",
        "_PROPOSING = 8", "_PROPOSING = 64",
        "tests/engine/test_drafts.py::test_room_is_checked_before_drafts_outgrow_it",
    ),
    Mutant(
        "a padded pass costs its padding", "policy/drafts/ngram_draft_governor.py",
        "[len(counts) * longest]", "[sum(counts)]",
        "tests/policy/test_draft_governor.py::"
        "test_padding_is_filled_and_a_pass_apart_is_used_in_full",
    ),
    Mutant(
        "the grammar of a free call ends with the call", "text/grammar/lazy_calls.py",
        " and not call.rules.is_accepting()", "",
        "tests/text/test_free_calls.py::test_a_call_as_the_template_writes_it_is_free_to_come",
    ),
    Mutant(
        "rewound tokens leave the grammar of a call", "text/grammar/lazy_calls.py",
        "self._calls[-1].rules.rollback(n)", "pass",
        "tests/text/test_free_calls.py::test_taken_back_tokens_leave_no_trace",
    ),
    Mutant(
        "a killed download leaves no parts", "models/hub.py",
        "if part.stat().st_mtime < before:", "if False:",
        "tests/cli/test_pull.py::test_pull_goes_on_after_kill_9",
    ),
    Mutant(
        "misses are counted", "service/parts/request_log.py",
        "self._count(miss)", "pass",
        "tests/api/test_cache_door.py::"
        "test_a_miss_costs_the_same_in_headers_metrics_cache_and_command_line",
    ),
    Mutant(
        "the page of the dashboard checks Host and Origin", "cli/web_dashboard.py",
        "self._check_host(request.headers, request.remote)", "pass",
        "tests/tui/test_web.py::test_the_page_wants_host_origin_and_key_as_the_service_does",
    ),
    Mutant(
        "the page of the dashboard wants the key", "cli/web_dashboard.py",
        "if self._key is not None and", "if False and",
        "tests/tui/test_web.py::test_the_page_wants_host_origin_and_key_as_the_service_does",
    ),
)  # fmt: skip
