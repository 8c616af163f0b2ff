"""Bounds of the work on a client's text and images."""

from tests.mutants.mutant import Mutant

POOL = "tests/text/test_limited_pool.py::"
WALKS = "tests/text/test_schema_walks.py::"
WORK = "tests/api/test_bounded_work.py::"
IMAGES = "tests/text/test_image_bounds.py::"

BOUNDED = (
    Mutant(
        "a stuck process is ended at its deadline", "text/limited_process.py",
        "if time.monotonic() > deadline:", "if False:",
        POOL + "test_a_stuck_process_is_ended_at_its_deadline",
    ),
    Mutant(
        "work ends when its client leaves", "service/parts/work_threads.py",
        "            has_left.set()\n", "            pass\n",
        WORK + "test_a_grammar_ends_when_its_client_leaves",
    ),
    Mutant(
        "slow work has few places", "text/limited_pool.py",
        "if self._has_place or cpu_s < self._quick_s:", "if True:",
        POOL + "test_a_slow_job_without_a_place_is_refused",
    ),
    Mutant(
        "each schema is read once", "text/schema_types.py",
        "if (id(schema), is_certain) in seen or (id(schema), True) in seen:", "if False:",
        WALKS + "test_walks_over_a_schema_end",
    ),
    Mutant(
        "types of arguments take bounded work", "text/schema_types.py",
        "or len(seen) > MAX_SEEN or self._n_left <= 0:", "or len(seen) > MAX_SEEN:",
        WALKS + "test_types_beyond_the_bound_are_any",
    ),
    Mutant(
        "references of tools add a bounded number of keywords",
        "text/template/tool_definitions.py",
        "expansion.n_left -= 1 + len(schema) if seen else 0", "pass",
        WALKS + "test_references_of_a_request_add_a_bounded_number_of_keywords",
    ),
    Mutant(
        "scans of a JPEG are bounded", "text/images/bounds.py",
        "if n_scans > MAX_SCANS or n_scans * n_pixels > MAX_SCANNED:", "if False:",
        IMAGES + "test_a_jpeg_of_many_scans_is_refused_by_its_markers",
    ),
    Mutant(
        "pixels of a request are added up", "text/images/reader.py",
        "if n_pixels > MAX_PIXELS_IN_ALL:", "if False:",
        IMAGES + "test_pixels_of_a_request_are_added_up",
    ),
    Mutant(
        "health tells which work is stuck", "service/parts/work_threads.py",
        "(threads.name for threads in self._members if",
        "(threads.name for threads in self._members[:1] if",
        WORK + "test_health_tells_which_work_is_stuck",
    ),
    Mutant(
        "a pattern of a tokenizer that gives up is a refusal", "text/tokens/pattern_panics.py",
        "if not is_panic(error):", "if True:",
        "tests/text/test_pattern_panics.py::test_a_pattern_that_gives_up_is_a_refusal",
    ),
)  # fmt: skip
