"""Protections from files of strangers."""

from tests.mutants.mutant import Mutant

FILES = "tests/host/test_foreign_json.py::"

STRANGERS = (
    Mutant(
        "the layers of a config are bounded", "models/foreign_json.py",
        "if is_number and most is not None and not -LARGEST <= value <= most:", "if not config:",
        FILES + "test_a_config_of_impossible_numbers_is_refused",
    ),
    Mutant(
        "JSON of a model folder has a largest size", "models/foreign_json.py",
        "if (size := file.stat().st_size) > most:", "if (size := file.stat().st_size) > 1 << 40:",
        FILES + "test_a_file_that_is_too_long_is_not_read",
    ),
    Mutant(
        "so has the header of weights", "models/model_files.py",
        "        if length > LONGEST:\n", "        if length > 1 << 40:\n",
        FILES + "test_a_header_that_is_too_long_is_not_read",
    ),
    Mutant(
        "a tokenizer makes no long text of a short one", "models/foreign_json.py",
        "if growth > LARGEST_GROWTH:", "if not file:",
        FILES + "test_a_tokenizer_that_makes_much_of_little_is_refused",
    ),
)  # fmt: skip
