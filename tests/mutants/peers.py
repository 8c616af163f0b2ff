"""The protections against false peers, damaged files and jumps of the clock."""

from tests.mutants.mutant import Mutant

TESTS = "tests/endurance/test_peers.py::"
LIES = TESTS + "test_a_peer_that_fails_or_lies_changes_no_answer_and_loses_no_agent"

PEERS = (
    Mutant(
        "an answer of a peer has a bound", "service/parts/peers.py",
        "if len(content) > ANSWER_BYTES:", "if len(content) > ANSWER_BYTES << 20:",
        LIES,
    ),
    Mutant(
        "a peer whose KV does not fit is left alone", "service/parts/peers.py",
        "await asyncio.wrap_future(self._engine.import_kv(manifest))",
        "self._engine.import_kv(manifest)",
        LIES,
    ),
    Mutant(
        "a peer gets each file of the agent once, and no other", "service/parts/peers.py",
        "for key in sorted({*needed.keys} & {*missing.keys}, key=needed.keys.index):",
        "for key in missing.keys:",
        LIES,
    ),
    Mutant(
        "a move can be made again", "service/calls/agents.py",
        "if stored.messages != moved.messages:", "if stored.messages:",
        LIES,
    ),
    Mutant(
        "a file is not closed while a thread writes it", "service/parts/peers.py",
        "await in_thread(incoming.write, part)", "await asyncio.to_thread(incoming.write, part)",
        TESTS + "test_a_file_that_is_being_written_is_not_closed_by_a_cancel",
    ),
    Mutant(
        "a folder in the place of a file is set aside", "store/files.py",
        "        path.rename(aside)\n", "        raise\n",
        "tests/endurance/test_damaged.py::test_a_folder_in_the_place_of_a_file_is_set_aside",
    ),
    Mutant(
        "a jump of the clock makes no file older", "store/disk_quota.py",
        "max_age_s=rules.max_age_s + jump_s", "max_age_s=rules.max_age_s",
        "tests/endurance/test_clock.py::test_a_jump_of_the_clock_makes_no_file_older",
    ),
    Mutant(
        "an age is not negative", "service/parts/agent_registry.py",
        "return max(0.0, now - then)", "return now - then",
        "tests/endurance/test_clock.py::"
        "test_a_clock_that_jumps_loses_no_agent_and_makes_no_negative_age",
    ),
    Mutant(
        "ranks compare their models before the first pass", "engine/distributed/parts.py",
        "        self._group.compare(loaded.facts.identity)\n", "",
        "tests/cli/test_hosts.py::"
        "test_a_rank_with_another_model_is_refused_before_the_first_pass",
    ),
)  # fmt: skip
