"""Protections of calls, their pieces and their results."""

from tests.mutants.mutant import Mutant

LENIENT = "tests/text/test_lenient_calls.py::"
RESULTS = "tests/text/test_tool_results.py::"
ENFORCEABLE = "tests/text/test_enforceable.py::"
STREAMED = "tests/text/test_streamed_calls.py::"

CALLS = (
    Mutant(
        "text that may become a mark is held back", "text/formats/answer_reader.py",
        "end = len(feed.text) if is_whole else marks.hold(feed.text, 0)", "end = len(feed.text)",
        "tests/text/test_any_split.py::test_a_derived_format_reads_any_split",
    ),
    Mutant(
        "no piece of a call is sent twice", "text/formats/call_writer.py",
        "self._write(self._prefix + text[self._n_copied :])", "self._write(self._prefix + text)",
        STREAMED + "test_arguments_follow_their_tokens_within_three",
    ),
    Mutant(
        "a cut call ends as it was sent", "text/formats/call_writer.py",
        "self._emit(_ended(call, self._written, is_cut=True))",
        "self._emit(_ended(call, arguments_json(arguments), is_cut=True))",
        STREAMED + "test_a_call_cut_in_its_arguments_is_what_was_sent",
    ),
    Mutant(
        "unmarked calls count at the end of an answer only", "text/formats/answer_reader.py",
        "if not sections or end < len(self._feed.text) or self._feed.is_cut:",
        "if not sections or self._feed.is_cut:",
        LENIENT + "test_an_answer_may_end_with_calls_without_marks",
    ),
    Mutant(
        "a name that no tool has is told with its whole call", "text/formats/call_writer.py",
        "if self.is_quiet or self._open is not None or not self._types.has(name):",
        "if self.is_quiet or self._open is not None:",
        STREAMED + "test_a_name_that_no_tool_has_is_told_with_its_whole_call",
    ),
    Mutant(
        "calls in the marks of others are those of offered tools", "text/formats/call_reader.py",
        "if read is not None and self.knows(read):", "if read is not None:",
        LENIENT + "test_an_answer_may_end_with_a_call_in_the_marks_of_another_model",
    ),
    Mutant(
        "only a declared argument ends a value", "text/formats/tagged_calls.py",
        "if not self.types.declares(argument.name, following.key):", "if not following.key:",
        LENIENT + "test_another_argument_ends_a_value_that_nothing_closes",
    ),
    Mutant(
        "a call that a value quotes is not one", "text/formats/tagged_calls.py",
        "outer = yield from self._enclosing(closing, mark.end)", "outer = None",
        "tests/text/test_malformed_calls.py::test_a_call_quoted_in_a_value_is_a_part_of_it",
    ),
    Mutant(
        "results go to the calls of their ids", "text/normalize_messages.py",
        "if waiting := by_id.get(call.id):", "if waiting := next(iter(by_id.values()), None):",
        RESULTS + "test_results_follow_the_order_of_their_calls",
    ),
    Mutant(
        "then to those of their names", "text/normalize_messages.py",
        "if index not in answers and (waiting := by_name.get(call.name)):",
        "if index not in answers and (waiting := by_name.get(None)):",
        RESULTS + "test_results_without_ids_are_paired_by_name_then_by_order",
    ),
    Mutant(
        "an odd property loosens itself alone", "text/grammar/enforceable.py",
        "        if not isinstance(schema, dict):\n            self.left_out",
        "        if True:\n            self.left_out",
        "tests/text/test_enforceable.py::test_the_largest_part_that_fits_is_found",
    ),
    Mutant(
        "message and place of a refused schema are of one part", "text/grammar/grammar_text.py",
        'f"{blamed.reason}; this is', 'f"{error.message}; this is',
        ENFORCEABLE + "test_the_message_of_a_refused_schema_is_about_its_place",
    ),
    Mutant(
        "tools that are too large together lose the largest alone", "text/grammar/loose_tools.py",
        "n_kept = bisect_left(range(1, n_kept), x=True, key=is_too_large)", "n_kept = 0",
        ENFORCEABLE + "test_a_huge_tool_leaves_the_grammar_of_others",
    ),
    Mutant(
        "repeated warnings of the grammar library are read", "text/grammar/compile_messages.py",
        "keywords, _ = json.JSONDecoder().raw_decode(warning, len(LEFT_OUT))",
        "keywords = json.loads(warning.removeprefix(LEFT_OUT))",
        "tests/api/test_structured.py::"
        "test_a_keyword_without_grammar_may_stand_at_several_places",
    ),
    Mutant(
        "arguments come in any order", "text/grammar/lark_builder.py",
        "if n_required > n:", "if True:",
        "tests/text/test_json_rules.py::test_members_come_in_any_order",
    ),
    Mutant(
        "an argument comes once", "text/grammar/lark_builder.py",
        " %if bit_clear({bit})", "",
        "tests/text/test_json_rules.py::test_members_come_in_any_order",
    ),
    Mutant(
        "lengths that take minutes to compile are not counted", "text/grammar/lark_builder.py",
        "schema if head == closes else self._countable(schema)", "schema",
        "tests/text/test_free_calls.py::"
        "test_long_texts_compile_and_what_is_not_counted_is_named",
    ),
    Mutant(
        "the input of a custom tool follows its grammar", "text/grammar/tool_inputs.py",
        '"pattern": f"^(?:{whole_text(pattern)})$"', '"description": pattern',
        "tests/text/test_tool_inputs.py::test_an_input_follows_its_grammar",
    ),
)  # fmt: skip
