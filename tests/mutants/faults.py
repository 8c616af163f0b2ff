"""The protections against what fails by itself: processes, the clock, the disk, the engine."""

from tests.mutants.mutant import Mutant

HOST = "tests/host/test_supervision.py::"
SLOTS = "tests/engine/test_slot_files.py::"
PACKING = "tests/engine/test_packing.py::"
SERVING = "tests/engine/test_serving.py::"

FAULTS = (
    Mutant(
        "a killed worker is started again", "control/supervisor.py",
        "if self._stop.is_set() or code == 0:", "if self._stop.is_set() or code <= 0:",
        HOST + "test_a9_a_killed_worker_is_started_again",
    ),
    Mutant(
        "a stuck worker is killed", "control/supervisor.py",
        "asyncio.create_task(self._until_stuck())", "asyncio.create_task(self._stop.wait())",
        HOST + "test_a9_a_stuck_worker_is_killed_and_started_again",
    ),
    Mutant(
        "a flapping worker is given up", "control/supervisor.py",
        "if len(self._crash_times) >= policy.max_crashes:", "if not self._crash_times:",
        HOST + "test_a_flapping_worker_is_given_up_loudly",
    ),
    Mutant(
        "a worker goes with its supervisor", "host/parent_watchdog.py",
        "    while os.read(0, 4096):\n", "    while True:\n        time.sleep(grace_s)\n",
        HOST + "test_a9_a_worker_does_not_outlive_a_killed_supervisor",
    ),
    Mutant(
        "who waits for a dead engine is told", "service/service.py",
        "n_failed = self._dispatcher.fail_all(Broken(message))", "n_failed = len(message)",
        "tests/service/test_service.py::test_a_dead_or_stuck_engine_fails_who_waits",
    ),
    Mutant(
        "who is cancelled waits for his thread", "service/parts/agent_store.py",
        "            cancelled = error\n", "            raise\n",
        "tests/service/test_threads.py::test_a_cancelled_caller_waits_for_the_end",
    ),
    Mutant(
        "a turn that a full disk did not take is kept", "service/calls/agents.py",
        "service.agent_store.reserve(agent, await in_thread(_history, past, facts))", "pass",
        "tests/api/test_lines.py::"
        "test_g12_a_turn_that_a_full_disk_did_not_take_is_written_with_the_next",
    ),
    Mutant(
        "one of two turns at once is refused", "service/calls/admission.py",
        "with service.agent_locks.joined(agent):", "with service.agent_locks.joined(\"\"):",
        "tests/api/test_lines.py::test_of_two_turns_at_once_one_is_refused",
    ),
    Mutant(
        "a clock that was set back takes nothing", "store/gc.py",
        "_Collection(stock, now - rules.grace_s)", "_Collection(stock, float(\"inf\"))",
        "tests/store/test_sweep.py::"
        "test_c14_a_clock_that_was_set_back_takes_nothing_that_was_used_since",
    ),
    Mutant(
        "nothing goes while a drive is unplugged", "store/slot_folder_registry.py",
        "if str(nearest) in MOUNTS:", "if not nearest:",
        "tests/store/test_bounded.py::test_c14_nothing_goes_while_a_slot_folder_is_unplugged",
    ),
    Mutant(
        "what waits for a slow disk is bounded", "store/background_writer.py",
        "n_after > self._max_bytes", "n_after < 0",
        "tests/store/test_disk_writer.py::test_g12_beyond_the_bound_of_bytes_it_is_busy_at_once",
    ),
    Mutant(
        "a full disk refuses in words", "store/files.py",
        "kind = DiskFull if error.errno in FULL else StackError", "kind = StackError",
        "tests/engine/test_disk_bounds.py::test_g12_a_full_disk_refuses_in_words_and_loses_nothing",
    ),
    Mutant(
        "a history belongs to its agent", "store/agent_history.py",
        "if not is_readable or about.agent != agent:", "if not about.version:",
        "tests/store/test_agent_folders.py::test_a_history_of_another_agent_is_told",
    ),
    Mutant(
        "a damaged history is told as such", "service/calls/agents.py",
        "    except Damaged as error:\n", "    except ZeroDivisionError as error:\n",
        "tests/api/test_agents.py::test_a_damaged_history_is_told_and_healed_by_full_messages",
    ),
    Mutant(
        "a slot file whose KV is gone is damaged", "engine/kv/slot_restore.py",
        "    except NotFound as error:\n", "    except ZeroDivisionError as error:\n",
        SLOTS + "test_c8_missing_kv_leaves_the_slot_as_it_was",
    ),
    Mutant(
        "a restored slot is still its tenant's", "engine/kv/slot_restore.py",
        "context.assign(source.manifest.salt, None", 'context.assign("", None',
        SLOTS + "test_d23_a_restored_slot_is_still_its_tenants",
    ),
    Mutant(
        "nor does another salt hit what is live", "engine/slots/prefix_lookup.py",
        "if context.salt == request.salt and is_usable:", "if is_usable:",
        SERVING + "test_d23_another_salt_does_not_hit",
    ),
    Mutant(
        "what can never fit is refused", "engine/loop.py",
        "if self.slot_kv.need(request) > self.slot_kv.prefix_cache.budget:", "if False:",
        "tests/engine/test_memory.py::"
        "test_b18_a_prompt_that_can_never_fit_is_refused_with_the_numbers",
    ),
    Mutant(
        "KV keeps to its budget", "engine/kv/prefix_cache.py",
        "over = live_bytes + before - self.budget", "over = 0",
        "tests/endurance/test_endurance.py::"
        "test_d4_f8_thirty_agents_over_four_slots_and_a_budget_for_six",
    ),
    Mutant(
        "a save ends when memory keeps no piece of it", "engine/kv/park.py",
        "if self._n_left == 0 or not", "if not",
        PACKING + "test_c17_a_save_comes_to_its_end_when_memory_has_no_room_for_a_piece",
    ),
    Mutant(
        "what a long turn left is packed in pieces", "engine/slots/slot_kv_manager.py",
        "self._store_in_pieces(self.slots[slot])", "self.store(self.slots[slot])",
        PACKING + "test_what_a_long_turn_left_is_packed_while_others_decode",
    ),
    Mutant(
        "a row that breaks in a step fails alone", "engine/decode/batch.py",
        "                self._broken.append((row, result))\n", "                raise result\n",
        SERVING + "test_a_request_that_raises_fails_alone",
    ),
    Mutant(
        "a lost file goes though what continues it is written", "engine/kv/prefix_cache.py",
        "            self.index.set_writing(lost_key, False)\n", "",
        "tests/engine/test_long_chains.py::"
        "test_a_lost_segment_goes_though_what_continues_it_is_being_written",
    ),
)  # fmt: skip
