"""Every protection with the way to switch it off, and the test that must fail then."""

from tests.mutants.answers import ANSWERS
from tests.mutants.bounded import BOUNDED
from tests.mutants.calls import CALLS
from tests.mutants.explanations import EXPLANATIONS
from tests.mutants.faults import FAULTS
from tests.mutants.features import FEATURES
from tests.mutants.first_aid import FIRST_AID
from tests.mutants.images import IMAGES
from tests.mutants.limits import LIMITS
from tests.mutants.mac import MAC
from tests.mutants.mutant import Mutant
from tests.mutants.operations import OPERATIONS
from tests.mutants.peers import PEERS
from tests.mutants.sharing import SHARING
from tests.mutants.strangers import STRANGERS
from tests.mutants.verification import VERIFICATION

GUARDS = "tests/api/test_guards.py::"
TENANTS = "tests/api/test_tenants.py::"
STORE = "tests/store/"
POWER = "tests/store/test_power_loss.py"
FUZZ = "tests/fuzz/test_fuzz.py::"

DOORS_AND_FILES = (
    Mutant(
        "a key where other machines reach it", "config/preset_checks.py",
        "        is_loopback(preset.server.host)\n        or preset.server.api_keys",
        "        True\n        or preset.server.api_keys",
        "tests/host/test_preset_reading.py::test_a2_refusals_name_file_line_key_and_remedy",
    ),
    Mutant(
        "only a known key opens", "api/guards.py",
        "fitting = [key for key in api_keys if fits(key, secret)]", "fitting = api_keys",
        GUARDS + "test_x11_a_key_opens_in_either_header",
    ),
    Mutant(
        "a stored digest is no key", "api/api_keys.py",
        "secrets.compare_digest(digest_of(secret), key.key)",
        "secret == key.key or secrets.compare_digest(digest_of(secret), key.key)",
        GUARDS + "test_a_digest_is_no_key",
    ),
    Mutant(
        "the tier decides the priority", "api/guards.py",
        "return Priority[key.tier.name]", "return Priority.NORMAL",
        GUARDS + "test_e9_priority_comes_from_key_and_endpoint_and_never_from_the_body",
    ),
    Mutant(
        "a key keeps its KV apart", "api/caller.py",
        'salt=salt_of(connection, body.cache_salt or "")', 'salt=body.cache_salt or ""',
        GUARDS + "test_d23_a_key_keeps_its_kv_apart",
    ),
    Mutant(
        "a key speaks only as its agents", "api/guards.py",
        "return not key.agents or any(", "return True or any(",
        GUARDS + "test_a_key_speaks_only_as_its_agents",
    ),
    Mutant(
        "a key of some agents reads of these only", "api/guards.py",
        "    if key.agents:\n", "    if not key:\n",
        GUARDS + "test_a_key_of_some_agents_does_not_read_what_all_say",
    ),
    Mutant(
        "and does nothing to all", "api/dialects/llama_server/slots.py",
        "status_code=200, opt=OF_ALL", "status_code=200",
        GUARDS + "test_a_key_of_some_agents_does_nothing_to_all",
    ),
    Mutant(
        "nor reads what others said", "api/dialects/native/agents.py",
        "if view.miss is not None and not is_unscoped(request):", "if False:",
        GUARDS + "test_a_key_of_some_agents_does_not_read_what_others_said",
    ),
    Mutant(
        "nor owns conversations without a name", "api/guards.py",
        " and not is_implicit(agent)", "",
        TENANTS + "test_a_key_of_some_agents_does_not_own_conversations_without_a_name",
    ),
    Mutant(
        "conversations have names under their salt", "policy/kv/conversation_id.py",
        "digest_size=16, key=key", "digest_size=16",
        TENANTS + "test_the_name_does_not_tell_what_somebody_said_under_another_salt",
    ),
    Mutant(
        "and diverge for nobody under another", "engine/slots/prefix_lookup.py",
        "if last is not None and last.salt == request.salt:", "if last is not None:",
        "tests/engine/test_serving.py::"
        "test_d23_where_an_agent_diverges_is_not_told_under_another_salt",
    ),
    Mutant(
        "no agent is more urgent than its key", "api/guards.py",
        "priority < priority_of(key)", "not priority",
        GUARDS + "test_e9_an_agent_is_not_made_more_urgent_than_the_key",
    ),
    Mutant(
        "the Host is checked", "api/host_rules.py",
        "if not (allowed.fullmatch(host) or _is_address(host)):", "if not host:",
        GUARDS + "test_hosts_against_dns_rebinding",
    ),
    Mutant(
        "the Origin is checked", "api/host_rules.py",
        "if origin is not None and not _is_friend(origin, host, allowed):", 'if origin == "":',
        GUARDS + "test_origins_of_foreign_pages",
    ),
    Mutant(
        "an Origin that is no URL is a stranger's", "api/host_rules.py",
        "except ValueError:\n        return False\n    if",
        "except KeyError:\n        return False\n    if",
        GUARDS + "test_origins_of_foreign_pages",
    ),
    Mutant(
        "a zone is no address", "api/host_rules.py",
        'return "%" not in host', "return True",
        GUARDS + "test_hosts_against_dns_rebinding",
    ),
    Mutant(
        "CORS is closed to strangers", "api/host_rules.py",
        'check(headers, scope["client"][0] if scope["client"] else None)', "pass",
        "tests/api/test_host_rules.py::test_a_stranger_is_refused_in_all_three",
    ),
    Mutant(
        "bodies are bounded", "api/request_body.py",
        "if len(data) + len(chunk) > self._max_bytes:", "if False:",
        GUARDS + "test_a_body_over_the_limit_is_413",
    ),
    Mutant(
        "what comes before a body is bounded", "api/connection_limits.py",
        "super().__init__(h11.SERVER, MAX_HEAD_BYTES)", "super().__init__(h11.SERVER, 2**40)",
        "tests/api/test_heads.py::test_a_long_head_is_refused_before_it_is_whole",
    ),
    Mutant(
        "a whole head is bounded, too", "api/connection_limits.py",
        "if n_bytes > MAX_HEAD_BYTES:", "if False:",
        "tests/api/test_request_heads.py::test_a_long_head_is_refused_though_it_is_whole",
    ),
    Mutant(
        "the depth of JSON is bounded", "api/errors.py",
        "SerializationException() | UnicodeDecodeError() | RecursionError():",
        "UnicodeDecodeError():",
        FUZZ + "test_json_deeper_than_can_be_read_is_400",
    ),
    Mutant(
        "names of slot files are checked", "store/slot_files.py",
        "if reason := _objection(name):", 'if reason := "":',
        STORE + "test_shelf.py::test_c9_a_bad_name_is_refused_and_nothing_is_written",
    ),
    Mutant(
        "files are private", "store/files.py",
        "fd, name = tempfile.mkstemp(prefix=TEMPORARY, dir=directory)",
        "fd, name = tempfile.mkstemp(prefix=TEMPORARY, dir=directory); os.fchmod(fd, 0o644)",
        STORE + "test_shelf.py::test_c11_overwriting_replaces_and_is_private",
    ),
    Mutant(
        "links are not followed", "store/files.py",
        "os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK", "os.O_RDONLY | os.O_NONBLOCK",
        STORE + "test_shelf.py::test_c9_a_link_is_not_followed",
    ),
    Mutant(
        "folders are private", "store/files.py",
        "directory.mkdir(mode=0o700, exist_ok=True)", "directory.mkdir(exist_ok=True)",
        STORE + "test_agent_folders.py::test_g12_files_are_0600_and_folders_0700",
    ),
    Mutant(
        "KV is checked while it is read", "store/kv_file_format.py",
        "if digest.hexdigest() != metadata.checksum:", "if not digest:",
        STORE + "test_vault.py::test_c8_every_flipped_bit_is_noticed_while_pouring",
    ),
    Mutant(
        "slot files are checked", "store/manifest_file.py",
        "if digest != _digest(body):", "if not digest:",
        STORE + "test_shelf.py::test_c8_every_flipped_bit_is_found",
    ),
    Mutant(
        "KV belongs to one identity of weights", "engine/kv/slot_restore.py",
        "if manifest.identity != self._identity:", "if not manifest.identity:",
        "tests/engine/test_slot_files.py::test_c8_g6_a_foreign_file_is_refused",
    ),
    Mutant(
        "another salt does not hit", "engine/kv/prefix_cache.py",
        "block_hash.salt(identity, tenant)", 'block_hash.salt(identity, "")',
        "tests/engine/test_memory.py::test_d23_parked_kv_of_a_tenant_is_not_found_by_another",
    ),
    Mutant(
        "the log says nothing of what was said", "service/parts/request_log.py",
        "                _log(request, view)\n",
        "                said = view.ended + decode(request.tokens)\n"
        "                _log(request, replace(view, ended=said))\n",
        "tests/api/test_native.py::"
        "test_h8_a_log_line_names_the_request_and_says_nothing_of_its_text",
    ),
    Mutant(
        "names of strangers are no control codes", "core/formatting.py",
        'c if c.isprintable() else c.encode("unicode_escape").decode() for c in text',
        "c for c in text",
        "tests/tui/test_behaviour.py::test_h6_a_hostile_agent_is_shown_literally_everywhere",
    ),
    Mutant(
        "code of a model does not run", "engine/loading/loader.py",
        "trust_remote_code=spec.trust_remote_code", "trust_remote_code=True",
        "tests/engine/test_foreign_code.py",
    ),
    Mutant(
        "nobody forges a turn", "text/tokens/special_token_escape.py",
        "while self._pattern.search(text):", "while False:",
        "tests/text/test_prompt.py::test_nobody_forges_a_turn",
    ),
    Mutant(
        "nor with letters that a tokenizer changes", "text/tokens/special_token_escape.py",
        "if self._normalize is None:", "if True:",
        FUZZ + "test_letters_that_become_a_special_token_make_no_turn",
    ),
    Mutant(
        "presets make no Python objects", "config/yaml_source.py",
        "loader = PlainYamlLoader(text)",
        "return SourcedDocument(yaml.unsafe_load(text), {(): top})",
        FUZZ + "test_a_preset_that_is_none_is_refused_in_words",
    ),
    Mutant(
        "the size of a grammar is bounded", "text/grammar/response_format.py",
        "if len(text) > MAX_CHARS:", "if not text:",
        "tests/api/test_limits.py::test_a_grammar_has_a_largest_size",
    ),
    Mutant(
        "a request waits until its KV fits", "policy/scheduling/scheduler.py",
        "return active + lookup.kv_bytes(request) <= limits.max_bytes", "return True",
        "tests/policy/test_scheduler.py::"
        "test_b18_a_request_waits_until_its_kv_fits_beside_that_of_others",
    ),
    Mutant(
        "the queue is bounded", "policy/scheduling/scheduler.py",
        "return len(after.waiting) > limits.max_waiting", "return False",
        "tests/engine/test_serving.py::test_e18_a_full_queue_refuses_with_retry_after",
    ),
    Mutant(
        "so is the waiting room", "api/swap_middleware.py",
        "if len(waiting) >= max(service.preset.queue.max_waiting, 1):", "if len(waiting) < 0:",
        "tests/api/test_waiting_room.py::test_e18_the_waiting_room_has_as_many_seats_as_the_queue",
    ),
    Mutant(
        "strangers do not wait in it", "api/swap_middleware.py",
        'check_key(connection.headers, scope["path"])', "pass",
        "tests/api/test_waiting_room.py::test_strangers_do_not_wait",
    ),
    Mutant(
        "who leaves is cancelled", "api/run_generation.py",
        "    except BaseException:\n        await cancel(working)\n", "    except BaseException:\n",
        "tests/api/test_streams.py::test_x9_a_client_that_leaves_without_a_stream",
    ),
    Mutant(
        "bytes are synced before the name", "store/files.py",
        "            disk.barrier(fd)\n", "            pass\n", POWER,
    ),
    Mutant(
        "the name is synced before it is said", "store/files.py",
        "        sync_directory(path.parent, flush)\n    except OSError as error:",
        "        pass\n    except OSError as error:", POWER,
    ),
    Mutant(
        "a file is replaced, not written over", "store/files.py",
        "            _replace(temporary, path)\n",
        "            path.write_bytes(temporary.read_bytes())\n            temporary.unlink()\n",
        POWER,
    ),
    Mutant(
        "an agent is forgotten at once", "store/files.py",
        "    path.replace(doomed)\n    sync_directory(path.parent, disk.sync)\n"
        "    shutil.rmtree(doomed)\n",
        "    shutil.rmtree(path)\n", POWER,
    ),
    Mutant(
        "KV goes after the end of what names it is certain", "store/gc.py",
        "            sync_directory(folder, disk.sync)\n", "            pass\n", POWER,
    ),
    Mutant(
        "what is in use is not swept", "store/gc.py",
        "if (file.identity, file.key) not in stock.in_use and file.used_at < young",
        "if file.used_at < young",
        STORE + "test_sweep.py::test_c14_nothing_in_use_named_or_fresh_goes",
    ),
    Mutant(
        "a full disk leaves the old file", "store/files.py",
        "            temporary.unlink(missing_ok=True)\n            raise",
        "            temporary.replace(path)\n            raise",
        STORE + "test_shelf.py::test_g12_a_refusing_disk_keeps_the_old_file",
    ),
    Mutant(
        "damaged KV is set aside", "store/kv_store.py",
        'path.replace(path.with_name(path.name.removesuffix(SUFFIX) + ASIDE))', "pass",
        STORE + "test_vault.py::test_c8_pouring_a_damaged_file_is_refused_and_sets_it_aside",
    ),
    Mutant(
        "a request that breaks fails alone", "engine/loop.py",
        "        except Exception as error:  # any error concerns this request only",
        "        except ZeroDivisionError as error:",
        "tests/engine/test_serving.py::test_a_prompt_that_breaks_its_prefill_fails_alone",
    ),
)  # fmt: skip

MUTANTS = (
    *DOORS_AND_FILES,
    *LIMITS,
    *FIRST_AID,
    *MAC,
    *VERIFICATION,
    *FEATURES,
    *CALLS,
    *IMAGES,
    *SHARING,
    *FAULTS,
    *PEERS,
    *STRANGERS,
    *BOUNDED,
    *ANSWERS,
    *OPERATIONS,
    *EXPLANATIONS,
)
