"""Protections of prompts, answers, commands and limits that a first use by others was missing."""

from tests.mutants.mutant import Mutant

REPLAY = "tests/text/test_replay.py::"
TRAITS = "tests/text/test_template_traits.py::"
HEADERS = "tests/text/test_guided_headers.py::"
DECODER = "tests/text/test_token_decoder.py::"
VOCABULARY = "tests/text/test_vocabulary.py::"
CHECK = "tests/text/test_grammar_check.py::"
BOUNDS = "tests/api/test_bounds.py::"
LLAMA = "tests/api/test_llama_server_suite.py::"
AGENTS = "tests/api/test_agents.py::"
IDENTITY = "tests/engine/test_identity.py::"
PROMPTS = "tests/engine/test_last_prompts.py::"
SWAPS = "tests/api/test_swap_limits.py::"

FIRST_AID = (
    Mutant(
        "a replayed call begins in its own turn", "text/prompt/splices.py",
        "start = text.rfind(header or self._call_markers.start, 0, place)",
        "start = text.find(header or self._call_markers.start)",
        REPLAY + "test_only_an_equal_call_is_replayed",
    ),
    Mutant(
        "a replayed call is the sampled tokens", "text/prompt/splices.py",
        "tokens = tuple(turn.blocks[first].tokens)",
        "written = marked[start : start + sketch.n_chars]\n"
        "                    tokens = tuple(self._encoder.encode(written).tokens)",
        REPLAY + "test_marks_that_an_assistant_only_mentions_are_no_call",
    ),
    Mutant(
        "a call in a channel is replayed", "text/prompt/splices.py",
        "        header = self._call_markers.header\n", '        header = ""\n',
        REPLAY + "test_calls_of_every_format_are_replayed",
    ),
    Mutant(
        "a text beside a thought and a call is taken", "text/template/adaptation.py",
        "(not capabilities.takes_text_and_thought, _move_texts),", "",
        TRAITS + "test_text_beside_a_call_ends_the_thought_where_both_are_refused",
    ),
    Mutant(
        "parallel calls are taken one by one", "text/template/adaptation.py",
        "(not capabilities.takes_parallel_calls, _separate_calls),", "",
        TRAITS + "test_parallel_calls_are_turns_of_their_own_where_one_is_the_limit",
    ),
    Mutant(
        "an answer goes on in the channel of its prefill", "text/output_parser.py",
        "            is_open=is_open,\n        )\n", "            is_open=False,\n        )\n",
        "tests/text/test_speech.py::"
        "test_a_harmony_answer_goes_on_in_the_channel_of_its_prefill",
    ),
    Mutant(
        "a guided answer goes on after its prefill", "service/parts/format_constraints.py",
        "has_headers = output_format.has_headers and not prompt.before",
        "has_headers = output_format.has_headers",
        HEADERS + "test_the_grammar_begins_at_once_after_a_prefill",
    ),
    Mutant(
        "a forbidden call opens no channel", "service/parts/format_constraints.py",
        "forbidden = output_format.call_sequences", "forbidden = ()",
        "tests/api/test_forced_calls.py::"
        "test_tool_choice_none_keeps_a_model_with_headers_from_a_call",
    ),
    Mutant(
        "text arguments keep their white space", "text/formats/argument_values.py",
        "return _listed(text, types)\n    kinds", "return _listed(bare, types)\n    kinds",
        "tests/text/test_parsers.py::test_text_keeps_its_white_space",
    ),
    Mutant(
        "the id of a call is not its name", "text/formats/call_bodies.py",
        'checked_call(fields["name"], fields.get("id"), arguments)',
        'checked_call(fields.get("id", fields["name"]), None, arguments)',
        "tests/text/test_parsers.py::test_mistral_calls_may_have_an_id",
    ),
    Mutant(
        "a guided answer has no channel of thoughts while thinking is off",
        "service/parts/format_constraints.py",
        "if has_headers and not may_think:", "if False:",
        HEADERS + "test_thinking_off_begins_with_the_answer",
    ),
    Mutant(
        "a guided answer opens no thought while thinking is off",
        "service/parts/format_constraints.py",
        "may_open = may_think and not is_in_thinking", "may_open = not is_in_thinking",
        "tests/api/test_structured_thinking.py::test_chat_completions_begin_with_the_grammar",
    ),
    Mutant(
        "a recursion of a template is a refusal", "text/rendering/worker.py",
        "except Exception as error:", "except ValueError as error:",
        TRAITS + "test_endless_recursion_of_a_template_is_a_refusal",
    ),
    Mutant(
        "a schema has the keys that its template reads", "text/template/adaptation.py",
        'SCHEMA_DEFAULTS: dict[str, Any] = {"type": "object", "properties": {}, "required": []}',
        "SCHEMA_DEFAULTS: dict[str, Any] = {}",
        TRAITS + "test_keys_of_a_schema_are_added_where_the_template_reads_them_unchecked",
    ),
    Mutant(
        "a bare amount of memory is in GB", "host/hardware.py",
        'POWERS[(match[2] or "G").upper()]', 'POWERS.get((match[2] or "B").upper(), 0)',
        "tests/cli/test_plan.py::test_a_bare_number_of_memory_means_gigabytes",
    ),
    Mutant(
        "plan counts the share of memory for KV", "planner/candidate.py",
        "if pct == AUTO:", "if True:",
        "tests/cli/test_plan.py::test_the_share_of_memory_for_kv_is_counted_and_named",
    ),
    Mutant(
        "a container reaches its host by name", "api/host_rules.py",
        'CONTAINER_HOSTS = frozenset({"host.docker.internal", "host.containers.internal"})',
        "CONTAINER_HOSTS: frozenset[str] = frozenset()",
        "tests/api/test_guards.py::test_names_of_this_machine",
    ),
    Mutant(
        "the type of the metrics has one charset", "api/dialects/llama_server/metrics.py",
        '"text/plain; version=0.0.4"', '"text/plain; version=0.0.4; charset=utf-8"',
        "tests/api/test_tenants.py::test_a_key_of_some_agents_reads_no_totals_and_no_path",
    ),
    Mutant(
        "a reader that leaves ends a command quietly", "cli/streams.py",
        "        except BrokenPipeError:\n", "        except ZeroDivisionError:\n",
        "tests/cli/test_words.py::test_a_reader_that_leaves_ends_the_command_quietly",
    ),
    Mutant(
        "a list of prompts is several", "api/prompts.py",
        "    if has_ids:\n        return (pieces,)\n", "    return (row,)\n",
        LLAMA + "test_a_list_of_prompts_gets_a_list_of_answers",
    ),
    Mutant(
        "biases of texts count", "api/request_fields.py",
        "tuple((key, value) for key, value in biases if isinstance(key, str))", "()",
        LLAMA + "test_a_bias_of_a_text_is_one_of_each_of_its_tokens",
    ),
    Mutant(
        "no limit of tokens is the context", "service/calls/admission.py",
        "return None if limit == UNLIMITED else limit", "return limit",
        LLAMA + "test_no_limit_of_a_preset_or_a_request_is_the_context",
    ),
    Mutant(
        "a model of a client brings no trust in its code", "service/engine_factory.py",
        "return replace(running, model=ModelSpec(id=model))",
        "return replace(running, model=replace(running.model, id=model))",
        "tests/api/test_load_trust.py::"
        "test_a_model_of_a_client_brings_no_trust_in_its_code",
    ),
    Mutant(
        "a refusal quotes nothing of a preset", "service/engine_factory.py",
        "f\"the file of the preset {name!r} is not valid; the service's log and \"",
        'f"{error.message} "',
        "tests/api/test_load_trust.py::test_a_refused_preset_shows_nothing_of_a_file",
    ),
    Mutant(
        "a request that breaks is told in the log", "engine/loop.py",
        "            log.error(\"request %s failed in the engine: %s\", request, error, "
        "exc_info=error)",
        "            pass",
        "tests/engine/test_going_back.py::"
        "test_a_request_that_breaks_leaves_a_traceback_in_the_log",
    ),
    Mutant(
        "grammars compile in a bounded time", "text/limited_process.py",
        "signal.setitimer(signal.ITIMER_PROF, max(limit_s, MIN_S))", "pass",
        CHECK + "test_a_grammar_that_compiles_for_too_long_is_refused_and_the_next_one_served",
    ),
    Mutant(
        "a wait for events ends after its own patience", "service/parts/request_stream.py",
        "if self._timer is not None and self._timer.when() > due:", "if False:",
        "tests/service/test_event_queue.py::test_a_wait_ends_after_its_own_patience",
    ),
    Mutant(
        "a text that cannot fit is not rendered", "text/prompt/prompt.py",
        "        if n_chars <= max(CHARS_PER_TOKEN * self._n_ctx, MIN_COUNTED_CHARS):\n"
        "            return\n",
        "        return\n",
        "tests/text/test_long_texts.py::test_a_text_that_cannot_fit_is_hardly_read",
    ),
    Mutant(
        "messages, calls and tools are bounded", "api/request_fields.py",
        "    if n > limit:\n", "    if n < 0:\n",
        BOUNDS + "test_messages_calls_and_tools_are_bounded",
    ),
    Mutant(
        "a body has 64 MiB at most", "core/preset.py",
        "] = 64 * 1024 * 1024\n", "] = 128 * 1024 * 1024\n",
        BOUNDS + "test_a_body_has_64_mib_at_most_by_default",
    ),
    Mutant(
        "bodies are converted beside the loop", "service/parts/image_checks.py",
        "converted = await run(lambda: convert(reader))",
        "converted = convert(reader)",
        BOUNDS + "test_a_body_is_converted_beside_the_loop",
    ),
    Mutant(
        "the version of mlx-lm is part of the identity of KV", "engine/loading/loader.py",
        "mlx_lm=mlx_lm.__version__,", 'mlx_lm="",',
        IDENTITY + "test_d17_the_versions_that_shape_kv_shape_the_identity",
    ),
    Mutant(
        "settings of a quantization are part of the identity of KV", "engine/loading/loader.py",
        "files = {path / QUANTIZATION}", "files = set[Path]()",
        IDENTITY + "test_d17_the_code_of_a_model_and_its_settings_shape_the_identity",
    ),
    Mutant(
        "last prompts are arrays of 32 bits", "engine/slots/prefix_lookup.py",
        'array("I", last.tokens)', 'array("Q", last.tokens)',
        PROMPTS + "test_f8_last_prompts_are_bounded_by_bytes_and_part_of_the_budget",
    ),
    Mutant(
        "last prompts are bounded in bytes", "engine/slots/prefix_lookup.py",
        "while len(self._prompts) > MAX_AGENTS or self._is_over():",
        "while len(self._prompts) > MAX_AGENTS:",
        PROMPTS + "test_f8_last_prompts_are_bounded_by_bytes_and_part_of_the_budget",
    ),
    Mutant(
        "a load that takes too long has a way back", "service/calls/model_swap.py",
        "        while time.monotonic() < ends_at:\n", "        while True:\n",
        SWAPS + "test_a_load_that_takes_too_long_goes_back",
    ),
    Mutant(
        "a load with progress is not ended", "service/calls/model_swap.py",
        "                ends_at = time.monotonic() + limit_s\n                begin",
        "                begin",
        SWAPS + "test_a_load_with_progress_is_not_ended",
    ),
    Mutant(
        "the self-check has a budget", "engine/decode/batching_check.py",
        "        if self._clock() - self._began_at > self._budget_s:\n", "        if False:\n",
        "tests/matrix/test_self_check.py::"
        "test_a_slow_machine_leaves_out_what_only_makes_answers_faster",
    ),
    Mutant(
        "a client whose prompts do not fit is not started", "cli/commands/env.py",
        "    if not anyway:\n        _check_context", "    if False:\n        _check_context",
        "tests/cli/test_env.py::test_a_client_whose_prompts_do_not_fit_is_not_started",
    ),
    Mutant(
        "health tells a step that is stuck", "api/dialects/llama_server/health_and_props.py",
        "    if trouble := change.trouble:\n        raise Loading(trouble)\n", "",
        SWAPS + "test_a_stuck_step_is_no_good_health",
    ),
    Mutant(
        "requests end with the drain", "service/service.py",
        "            self._end_requests(Loading(LEAVING)),\n", "",
        "tests/api/test_shutdown.py::test_requests_end_with_the_drain_while_a_step_goes_on",
    ),
    Mutant(
        "an engine has time to park", "service/service.py",
        "asyncio.wait({stopping}, timeout=0.0 if was_loading else PARKING_S)",
        "asyncio.wait({stopping}, timeout=0.0)",
        "tests/api/test_shutdown.py::test_requests_end_with_the_drain_while_a_step_goes_on",
    ),
    Mutant(
        "freed memory goes back at rest", "service/calls/background_tasks.py",
        "        await return_free_memory(gate)\n", "        pass\n",
        "tests/api/test_memory_returns.py::"
        "test_a_service_at_rest_gives_freed_memory_back",
    ),
    Mutant(
        "freed memory stays free at rest", "service/calls/idle_unload.py",
        "        allow_huge_pages(is_allowed=False)\n", "",
        "tests/api/test_memory_returns.py::"
        "test_huge_pages_are_off_while_idle_and_on_for_a_request",
    ),
    Mutant(
        "a request has huge pages", "service/parts/gate.py",
        "            self.on_next()\n", "",
        "tests/api/test_memory_returns.py::"
        "test_huge_pages_are_off_while_idle_and_on_for_a_request",
    ),
    Mutant(
        "malloc has two arenas", "host/hardware.py",
        'TUNABLES = ("glibc.malloc.hugetlb=1", "glibc.malloc.arena_max=2")',
        'TUNABLES = ("glibc.malloc.hugetlb=1",)',
        "tests/host/test_this_machine.py::"
        "test_malloc_is_tuned_on_linux_and_what_the_user_set_stays",
    ),
    Mutant(
        "no page of the schema is served", "api/app.py",
        "        render_plugins=[\n",
        "        render_plugins=[\n"
        '            __import__("litestar.openapi.plugins").openapi.plugins.RedocRenderPlugin(),\n',
        "tests/api/test_openapi.py::test_no_page_of_the_schema_loads_a_script",
    ),
    Mutant(
        "doctor tells the limit of open files", "cli/doctor.py",
        "        _descriptors(),\n", "",
        "tests/host/test_descriptors.py::test_doctor_tells_the_limit",
    ),
    Mutant(
        "a key of some agents reads no metrics", "api/dialects/llama_server/metrics.py",
        "opt={**OF_ALL, **UNLOADED}", "opt={**UNLOADED}",
        "tests/api/test_tenants.py::test_a_key_of_some_agents_reads_no_totals_and_no_path",
    ),
    Mutant(
        "buffers are freed while nothing loads from Python", "engine/device.py",
        "    with LOADING:\n        mx.clear_cache()", "    mx.clear_cache()",
        "tests/engine/test_buffer_cache.py::"
        "test_buffers_are_freed_while_another_engine_loads_without_a_deadlock",
    ),
    Mutant(
        "an agent that is never kept writes no KV", "policy/kv/parking.py",
        " and persist is not Persist.NEVER", "",
        AGENTS + "test_persist_modes",
    ),
    Mutant(
        "an agent that is kept at its parking writes none after a turn",
        "engine/slots/slot_kv_manager.py",
        "self._persist is Persist.AFTER_TURN", "self._persist is not Persist.NEVER",
        AGENTS + "test_persist_modes",
    ),
    Mutant(
        "half precision has two bytes", "store/kv_file_format.py",
        '**dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),',
        '**dict.fromkeys(("U16", "I16", "F16", "BF16"), 4),',
        "tests/store/test_blob_file.py::test_g2_the_dtypes_are_those_of_safetensors",
    ),
    Mutant(
        "a client that leaves releases its turn", "service/calls/admission.py",
        "                entering.result().close()\n", "                pass\n",
        AGENTS + "test_x_9_a_client_that_leaves_leaves_no_trace",
    ),
    Mutant(
        "a client that leaves ends its request in the engine", "service/service.py",
        "                stream.cancel()\n", "                pass\n",
        AGENTS + "test_x_9_a_client_that_leaves_leaves_no_trace",
    ),
    Mutant(
        "a list of JSON as a result is not lost", "api/dialects/openai_chat/messages.py",
        "case [_, *_] if all(_is_part(part, kinds) for part in content):", "case list():",
        "tests/api/test_client_shapes.py::test_the_result_of_a_tool_may_be_any_json",
    ),
    Mutant(
        "empty lines before a request line are ignored", "api/connection_limits.py",
        'if data.startswith((b"\\r", b"\\n")):', "if not data:",
        "tests/api/test_request_heads.py::test_empty_lines_before_a_request_line_are_ignored",
    ),
    Mutant(
        "byte letters behind another decoder are bytes", "text/tokens/token_decoder.py",
        'if "ByteLevel" not in step_kinds(spec) and _has_byte_letters(backend):', "if not backend:",
        DECODER + "test_streamed_text_is_the_text_of_all_tokens",
    ),
    Mutant(
        "a row of bytes is one text", "text/tokens/token_decoder.py",
        "return [REPLACEMENT] * len(row)", 'return [row.decode(errors="replace")]',
        DECODER + "test_a_row_of_bytes_that_is_cut_short_is_unknown",
    ),
    Mutant(
        "an added word is its letters", "text/tokens/token_decoder.py",
        "frozenset(content for content in contents if not is_utf8(letters_to_bytes(content)))",
        "frozenset[str]()",
        DECODER + "test_an_added_word_is_its_letters_where_they_are_no_bytes",
    ),
    Mutant(
        "the first token alone loses the space before it", "text/tokens/token_decoder.py",
        "self._is_first = False\n            return [self._decoder",
        "return [self._decoder",
        DECODER + "test_streamed_text_is_the_text_of_all_tokens",
    ),
    Mutant(
        "an answer that goes on says nothing of its prompt again", "text/tokens/token_decoder.py",
        "return LaterDetokenizer(stream, self.text(before).removeprefix(written))", "return stream",
        DECODER + "test_streamed_text_is_the_text_of_all_tokens",
    ),
    Mutant(
        "ids beyond a hole of the vocabulary are text", "text/output_parser.py",
        "self._output_format.pieces.piece(token) is None",
        "token >= len(self._output_format.tokenizer)",
        "tests/text/test_speech.py::test_a_token_beyond_a_hole_of_the_vocabulary_is_text",
    ),
    Mutant(
        "grammars take ids beyond a hole of the vocabulary", "text/grammar/vocabulary.py",
        "[decoder.of(token) for token in range(n_vocab)]",
        '[decoder.of(token) if token < len(tokenizer) else b"" for token in range(n_vocab)]',
        VOCABULARY + "test_a_grammar_takes_tokens_beyond_a_hole",
    ),
    Mutant(
        "forced text has the bytes of its tokens", "text/grammar/vocabulary.py",
        "if one < len(self.tokens)) == data:", "if one < len(self.tokens)) or data:",
        VOCABULARY + "test_a_grammar_forces_a_text_of_the_vocabulary",
    ),
    Mutant(
        "a hole in the ids loads with any decoder", "engine/loading/tokenizer_wrapper.py",
        "with _LOCK, _unused_detokenizers():", "with _LOCK:",
        "tests/engine/test_tokenizer_wrapper.py::test_a_hole_in_the_ids_loads_with_any_decoder",
    ),
)  # fmt: skip
