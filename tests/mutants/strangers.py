"""Protections from files, hubs, templates and requests of strangers."""

from tests.mutants.mutant import Mutant

FILES = "tests/host/test_foreign_json.py::"
HEADS = "tests/api/test_request_heads.py::"
RENDERING = "tests/text/test_template_rendering.py::"

STRANGERS = (
    Mutant(
        "the layers of a config are bounded", "models/bounded_json.py",
        "if is_number and most is not None and not -MAX_SIZE <= value <= most:", "if not config:",
        FILES + "test_a_config_of_impossible_numbers_is_refused",
    ),
    Mutant(
        "JSON of a model folder has a largest size", "models/bounded_json.py",
        "(size := file.stat().st_size) > max_bytes:", "(size := file.stat().st_size) > 1 << 40:",
        FILES + "test_a_file_that_is_too_long_is_not_read",
    ),
    Mutant(
        "so has the header of weights", "models/model_files.py",
        "        if length > MAX_FILE_BYTES:\n", "        if length > 1 << 40:\n",
        FILES + "test_a_header_that_is_too_long_is_not_read",
    ),
    Mutant(
        "a tokenizer makes no long text of a short one", "models/folder_check.py",
        "if growth > MAX_GROWTH:", "if not file:",
        FILES + "test_a_tokenizer_that_makes_much_of_little_is_refused",
    ),
    Mutant(
        "depth of a model's JSON is a sentence", "models/bounded_json.py",
        "parsed = json.loads(data)\n    except RecursionError:",
        "parsed = json.loads(data)\n    except ZeroDivisionError:",
        FILES + "test_a_file_that_cannot_be_read_is_named",
    ),
    Mutant(
        "a hub names no path as a hash", "models/weight_download.py",
        "if not SHA256.fullmatch(digest):", "if not digest:",
        "tests/cli/test_pull.py::test_a_name_of_the_hub_is_no_path",
    ),
    Mutant(
        "nor as a commit or an ETag", "models/hub_answers.py",
        "if not NAME.fullmatch(name):", "if not name:",
        "tests/cli/test_pull.py::test_a_name_of_the_hub_is_no_path",
    ),
    Mutant(
        "a rendering has a limit of time", "text/rendering/renderers.py",
        "allowed_s = limit_s if left_s is None else left_s", "allowed_s = 9 * limit_s",
        RENDERING + "test_a_rendering_beyond_a_limit_ends_and_the_next_one_is_served",
    ),
    Mutant(
        "renderings of a request share a budget", "text/rendering/renderers.py",
        "self._budget.left_s = left_s - used_s", "self._budget.left_s = left_s",
        RENDERING + "test_all_renderings_of_a_request_share_one_budget",
    ),
    Mutant(
        "health tells that all text threads are stuck", "service/service.py",
        "processor.threads.stuck_work(TEXT_STALLED_S)", '""',
        "tests/api/test_template_overruns.py::"
        "test_health_tells_that_every_text_thread_is_stuck",
    ),
    Mutant(
        "a gateway decides by the canonical path", "api/connection_limits.py",
        'scope["path"] = canonical_path(path)', 'scope["path"] = path',
        "tests/gateway/test_member_paths.py::"
        "test_no_spelling_of_a_change_of_models_reaches_a_member",
    ),
    Mutant(
        "two lengths of a body are refused", "api/connection_limits.py",
        'if {b"content-length", b"transfer-encoding"} <= {', 'if {b"", b"transfer-encoding"} <= {',
        HEADS + "test_two_lengths_are_refused_and_the_connection_is_closed",
    ),
    Mutant(
        "bodies in flight share a budget", "api/request_body.py",
        "if self.n_bytes + n_bytes > self._max_bytes:", "if n_bytes > self._max_bytes:",
        "tests/api/test_request_bodies.py::"
        "test_bodies_in_flight_share_a_budget_which_is_given_back",
    ),
    Mutant(
        "the budget of bodies is given back", "api/request_body.py",
        "        self.n_bytes -= n_bytes\n", "",
        "tests/api/test_request_bodies.py::"
        "test_bodies_in_flight_share_a_budget_which_is_given_back",
    ),
    Mutant(
        "grammars spell no special token", "text/grammar/vocabulary.py",
        "sorted(at for at in nameless(tokenizer).values() if at < n_vocab)", "[0] * 0",
        "tests/text/test_vocabulary.py::test_free_text_takes_no_mark",
    ),
    Mutant(
        "results are paired with their calls", "text/prompt/prompt.py",
        "messages=pair_results(conversation.messages),", "messages=conversation.messages,",
        "tests/api/test_result_order.py::"
        "test_results_in_any_order_are_one_prompt_of_one_conversation",
    ),
    Mutant(
        "no prompt holds a token without a row", "text/tokens/rowless_tokens.py",
        "        if not self._texts:\n", "        if tokens:\n",
        "tests/api/test_rowless_tokens.py::"
        "test_a_prompt_with_it_is_refused_by_its_name",
    ),
    Mutant(
        "nor does a chat template write one", "engine/loading/tokenizer_folder.py",
        "if written := sorted(rowless.keys() & _template_tokens(tokenizer)):",
        "if written := sorted(rowless.keys() - rowless.keys()):",
        "tests/engine/test_token_ends.py::"
        "test_a_template_that_writes_a_token_without_a_row_is_refused",
    ),
    Mutant(
        "a slot is no longer than learned positions", "engine/loading/loader.py",
        "if 0 < facts.n_positions < n_ctx:", "if 0 > n_ctx:",
        "tests/engine/test_embedding_tables.py::"
        "test_a_slot_is_no_longer_than_the_learned_positions",
    ),
    Mutant(
        "an end without a row is left out", "engine/loading/token_ends.py",
        "if token is not None and 0 <= token < n_ids}", "if token is not None}",
        "tests/engine/test_token_ends.py::"
        "test_usable_ends_are_kept_and_others_named",
    ),
    Mutant(
        "a template that closes turns ends answers", "engine/loading/token_ends.py",
        "            added |= template_ends(tokenizer, n_ids)\n",
        "            template_ends(tokenizer, n_ids)\n",
        "tests/engine/test_token_ends.py::"
        "test_a_token_that_closes_turns_in_the_template_is_an_end",
    ),
    Mutant(
        "KV of a dynamic base is that of prompts of its length", "engine/model/length_rope.py",
        "if n_prefill <= fixed:", "if not request.salt:",
        "tests/engine/test_dynamic_rope.py::"
        "test_the_next_turn_is_that_of_mlx_lm",
    ),
    Mutant(
        "attention in both directions does not embed", "models/embedding_recipe.py",
        "if evidence := key_on or key_off or name:", "if evidence := key_on and key_off and name:",
        "tests/engine/test_embedding_recipe.py::"
        "test_attention_in_both_directions_is_refused",
    ),
    Mutant(
        "padding is in no mean", "engine/embedding_pooling.py",
        "    is_token = place < n_tokens\n", "    is_token = place < states.shape[1] + n_tokens\n",
        "tests/engine/test_embedding_recipe.py::"
        "test_each_pooling_is_that_of_the_library",
    ),
    Mutant(
        "code of a tokenizer does not run", "engine/loading/tokenizer_folder.py",
        '{"trust_remote_code": False, ', '{"trust_remote_code": None, ',
        "tests/engine/test_foreign_code.py::"
        "test_code_of_a_tokenizer_runs_neither_by_a_preset_nor_by_an_answer",
    ),
    Mutant(
        "a named pipe is never opened", "models/bounded_json.py",
        "    if kind:\n        raise SetupError(",
        "    if not kind and not file:\n        raise SetupError(",
        "tests/host/test_folder_check.py::"
        "test_a_named_pipe_is_refused_and_never_opened",
    ),
)  # fmt: skip
