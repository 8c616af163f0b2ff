"""Protections of `verify --mac`, of its kernels and of the record of its soak."""

from tests.mutants.mutant import Mutant

KERNELS = "tests/mac/test_kernels.py::"
SOAK = "tests/mac/test_soak.py::"

VERIFICATION = (
    Mutant(
        "a panic report during a soak is a fault", "cli/verification/soak.py",
        "        and not reports\n", "",
        SOAK + "test_a_panic_report_that_comes_during_the_soak_is_a_fault",
    ),
    Mutant(
        "a soak is on disk after each round", "cli/verification/soak.py",
        "            self._keep(self.counts)\n", "",
        SOAK + "test_a_soak_that_is_killed_is_told_by_doctor_and_by_the_next_one",
    ),
    Mutant(
        "a soak ends with a killed run", "cli/commands/verify.py",
        "    follow_supervisor(os.environ)\n", "",
        SOAK + "test_a_soak_ends_with_the_process_that_started_it_and_is_told",
    ),
    Mutant(
        "kernels are compared within the rounding", "engine/checks/kernels.py",
        "is_ok = largest <= tolerance.deviations", "is_ok = bool(tolerance)",
        KERNELS + "test_attention_that_is_wrong_from_1024_keys_on_is_found_and_named",
    ),
    Mutant(
        "the last key weighs as much as all others", "engine/checks/kernels.py",
        "    values[..., -1, :] *= n_keys**0.5\n", "",
        KERNELS + "test_one_key_too_few_is_found_in_half_precision",
    ),
    Mutant(
        "an answer of verify passes 4,096 tokens", "cli/verification/identity.py",
        "n_context - N_ANSWER // 2", "n_context // 2 - N_ANSWER // 2",
        "tests/cli/test_verify.py"
        "::test_decode_attention_that_is_wrong_in_long_contexts_is_found",
    ),
)  # fmt: skip
