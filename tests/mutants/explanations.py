"""Protections of the explanation of a request: headers, phases, saved time, names."""

from tests.mutants.mutant import Mutant

LATE = "tests/api/test_late_headers.py::"
PHASES = "tests/engine/test_phases.py::"
VIEWS = "tests/tui/test_views.py::"
SETTINGS = "tests/tui/test_settings.py::"

EXPLANATIONS = (
    Mutant(
        "a late answer has the figures of the cache", "api/run_generation.py",
        "headers = answer_headers(orders[0], orders[0].assigned)",
        "headers = answer_headers(orders[0], None)",
        LATE + "test_the_head_of_a_late_answer_has_the_figures_of_the_cache",
    ),
    Mutant(
        "a head waits for the lookup", "api/run_generation.py",
        "timeout=max(0.0, LOOKUP_S - EARLY_S)", "timeout=0.0",
        LATE + "test_the_head_of_a_queued_answer_waits_for_the_lookup",
    ),
    Mutant(
        "chunks of other prompts are a wait", "engine/loop.py",
        "self._phases.note(self._state.slots, chunk.slot)",
        "self._phases.note(self._state.slots)",
        PHASES + "test_a_prompt_waits_for_the_chunks_of_another_one",
    ),
    Mutant(
        "a shared prefix is another prompt's", "engine/slots/request_state.py",
        "is_awaiting = request_state.request.id in self.awaiting", "is_awaiting = False",
        PHASES + "test_a_request_that_waits_for_a_shared_prefix_waits_for_another_prompt",
    ),
    Mutant(
        "decode steps of others are a wait", "engine/loop.py",
        "self._phases.note(self._state.slots, is_decoding=True)",
        "self._phases.note(self._state.slots)",
        PHASES + "test_decode_steps_of_another_answer_are_a_phase_of_their_own",
    ),
    Mutant(
        "a phase begins where the last one ends", "engine/slots/request_state.py",
        "            self._seconds[self._phase] += max(0.0, now - self._since)\n",
        "            self._seconds[phase] += max(0.0, now - self._since)\n",
        PHASES + "test_phases_add_up_to_the_time_until_the_end",
    ),
    Mutant(
        "saved time has one speed", "engine/stats.py",
        "        return cold_s\n", "        return self.expected_s(0, n_cached)\n",
        PHASES + "test_saved_time_is_reckoned_from_one_speed",
    ),
    Mutant(
        "a wait for other prompts is lost time", "tui/views/costs.py",
        "        (request.others_s, \"waited for other prompts\"),\n",
        "",
        VIEWS + "test_a_wait_for_other_prompts_counts_as_lost_time",
    ),
    Mutant(
        "names that begin alike differ", "tui/views/table_data.py",
        "if column.is_cut_inside and", "if False and",
        VIEWS + "test_agents_of_one_beginning_differ_where_they_are_cut",
    ),
    Mutant(
        "prefixes have words after a restart", "engine/slots/prefix_lookup.py",
        "tokens = self._tokens_of_block(node.record.blocks[0])", "tokens = ()",
        "tests/service/test_prefix_openings.py::"
        "test_prefixes_have_openings_after_a_restart",
    ),
    Mutant(
        "a wrong key is named", "tui/settings.py",
        "            if not _is_key(key.strip()):", "            if False:",
        SETTINGS + "test_a_wrong_entry_is_named_in_one_sentence",
    ),
)  # fmt: skip
