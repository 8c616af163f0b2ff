"""Protections of installed services, metrics, logs and copies of a home."""

from tests.mutants.mutant import Mutant

INSTALL = "tests/cli/test_install.py::"
UNITS = "tests/host/test_units.py::"
COPIES = "tests/cli/test_home_copy.py::"
METRICS = "tests/api/test_metrics.py::"
LINES = "tests/host/test_log_lines.py::"
NATIVE = "tests/api/test_native.py::"
TLS = "tests/api/test_tls_proxy.py::"

OPERATIONS = (
    Mutant(
        "a unit has the options of its installation", "cli/commands/install.py",
        "command=(*up, *choice.arguments(home), \"--foreground\"),",
        "command=(*up, *(choice.models or ()), \"--foreground\"),",
        INSTALL + "test_each_option_of_up_reaches_up",
    ),
    Mutant(
        "a unit finds its model from any folder", "cli/start_choice.py",
        "    return reference.resolve(model, home).id\n", "    return model\n",
        INSTALL + "test_a_model_folder_is_installed_with_options_and_removed_by_its_folder",
    ),
    Mutant(
        "an installed gateway is one that can start", "cli/commands/install.py",
        "lambda: gateway.check_free(plan, home)", "lambda: None",
        INSTALL + "test_a_gateway_that_up_refuses_is_not_installed",
    ),
    Mutant(
        "the PATH of a unit has each folder once", "cli/commands/install.py",
        "folders = dict.fromkeys(value.split(os.pathsep))", "folders = value.split(os.pathsep)",
        INSTALL + "test_the_path_of_a_unit_names_each_folder_once",
    ),
    Mutant(
        "a unit of systemd logs to the journal", "control/service_units.py",
        '"StandardOutput=journal"', '"StandardOutput=null"',
        UNITS + "test_a_systemd_unit_writes_to_the_journal",
    ),
    Mutant(
        "a copied home stops no service of the original", "host/services.py",
        "if state is not None and _is_of(home, state):", "if state is not None:",
        COPIES + "test_a_copy_of_a_running_home_leaves_its_services_alone",
    ),
    Mutant(
        "decode steps are in a histogram", "engine/stats.py",
        "            DECODE_STEP_TIMES.observe(self.step_s)\n", "",
        METRICS + "test_histograms_count_requests_and_decode_steps",
    ),
    Mutant(
        "first tokens are in a histogram", "service/parts/request_log.py",
        "                    self.first_token_times.observe(view.ttft_s)\n", "",
        METRICS + "test_histograms_count_requests_and_decode_steps",
    ),
    Mutant(
        "a logger writes JSON", "host/log_lines.py",
        "        return text_of(line)\n", "        return line.message\n",
        LINES + "test_a_logger_writes_one_json_object_a_line",
    ),
    Mutant(
        "a line of another form stays as it is", "host/log_lines.py",
        "        return LogLine(message=text)\n", '        return LogLine(message="")\n',
        LINES + "test_a_line_that_is_not_ours_stays_as_it_is",
    ),
    Mutant(
        "the log of a request has its figures as fields", "service/parts/request_log.py",
        ', extra={"fields": fields})', ")",
        NATIVE + "test_h8_a_log_line_names_the_request_and_says_nothing_of_its_text",
    ),
    Mutant(
        "commands trust the certificates of SSL_CERT_FILE", "client/client.py",
        "verify=False if is_plain else httpx.create_ssl_context(),", "verify=not is_plain,",
        TLS + "test_the_command_trusts_the_certificate_that_a_variable_names",
    ),
)  # fmt: skip
