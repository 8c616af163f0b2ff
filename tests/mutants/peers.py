"""The protections against peers that fail or give false answers, and against damaged files."""

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
        "await asyncio.wrap_future(self._adopt(manifest))", "self._adopt(manifest)",
        LIES,
    ),
    Mutant(
        "a peer gets each file of the agent once, and no other", "service/parts/peers.py",
        "for key in sorted({*wanted.keys} & {*missing.keys}, key=wanted.keys.index):",
        "for key in missing.keys:",
        LIES,
    ),
    Mutant(
        "a move can be made again", "service/calls/agents.py",
        "if there.messages != moved.messages:", "if there.messages:",
        LIES,
    ),
    Mutant(
        "a file is not closed while a thread writes it", "service/parts/peers.py",
        "await in_thread(incoming.write, part)", "await asyncio.to_thread(incoming.write, part)",
        TESTS + "test_a_file_that_is_being_written_is_not_closed_by_a_cancel",
    ),
    Mutant(
        "a folder in the place of a file is set aside", "store/atomic_write.py",
        "        path.rename(aside)\n", "        raise\n",
        "tests/endurance/test_damaged.py::test_a_folder_in_the_place_of_a_file_is_set_aside",
    ),
)  # fmt: skip
