"""The pages: links lead somewhere, commands exist, generated parts are what the code says."""

import functools
import itertools
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from mlxstack.cli.commands.bench import NAMES
from mlxstack.cli.exit_codes import Exit
from mlxstack.cli.main import UPDATE, app
from tests.cli.terminal import CLI, Shell
from tests.pages import more_shapes

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")
ANCHOR = re.compile(r"\]\((?!https?://)([^)#\s]*)#([^)\s]+)\)")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SOURCE = re.compile(r"`([a-z_]+(?:/[a-z_0-9]+)*/[a-z_0-9]+\.py)`")
INLINE = re.compile(r"`mlx-stack ([a-z][^`]*)`")


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


def commands(page: Path) -> Iterator[str]:
    """Every `mlx-stack ...` that the page tells people to type, without what stands behind."""
    text = page.read_text(encoding="utf-8")
    for _, block in BLOCK.findall(text):
        for line in block.splitlines():
            typed = line.strip().removeprefix("$ ").partition(" #")[0].partition(" && ")[0]
            match = re.match(r'(?:eval "\$\()?mlx-stack (\S[^)"]*)', typed)
            if match:
                yield match[1]
    yield from INLINE.findall(text)


@functools.cache
def whole_command() -> Any:
    """All verbs and options."""
    return get_command(app)


def refused(line: str) -> str | None:
    """Why click would not take this line, looking only at verbs and options."""
    args = [word for word in shlex.split(line) if not word.startswith("…")]
    command = whole_command()
    while hasattr(command, "commands") and args and not args[0].startswith(("-", "<")):
        verb = args.pop(0)
        for alternative in verb.split("|"):
            if alternative not in command.commands:
                return f"no verb {alternative}"
        command = command.commands[verb.partition("|")[0]]
    options = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    options_given = [
        word.partition("=")[0] for word in args[: args.index("--") if "--" in args else None]
    ]
    unknown = [
        word for word in options_given if word.startswith("--") and word not in {*options, "--help"}
    ]
    return f"no option {unknown[0]}" if unknown else None


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_l2_links_lead_somewhere(page: Path) -> None:
    missing = [link for link in LINK.findall(page.read_text(encoding="utf-8"))
               if not (page.parent / link).exists()]  # fmt: skip
    assert missing == []


def anchor_of(heading: str) -> str:
    """Anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")


@functools.cache
def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    return {anchor_of(heading) for heading in re.findall(r"^#+ (.*)", text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_l2_anchors_lead_to_headings(page: Path) -> None:
    linked = ANCHOR.findall(page.read_text(encoding="utf-8"))
    targets = [((page.parent / file if file else page).resolve(), name) for file, name in linked]
    assert [link for link in targets if link[1] not in anchors(link[0])] == []


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_l2_every_command_exists_with_its_options(page: Path) -> None:
    wrong = {line: reason for line in commands(page) if (reason := refused(line))}
    assert wrong == {}


def linked(page: Path) -> set[Path]:
    """Files that a page links to."""
    return {
        (page.parent / link).resolve() for link in LINK.findall(page.read_text(encoding="utf-8"))
    }


def test_l2_the_index_leads_to_every_page_and_the_readme_to_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    assert index in linked(ROOT / "README.md")
    pages = {page for page in PAGES[1:] if page.parent.name != "decisions"}
    assert pages - linked(index) - {index} == set()


ANSWERS = {
    "API key": ("remote-access.md", "`mlx-stack key` makes a key"),
    "TLS proxy": ("remote-access.md#tls", "reverse_proxy 127.0.0.1:7109"),
    "model that fits": ("capacity.md", "Which model on which Mac"),
    "idle": ("slots-and-agents.md#unloading-an-idle-model", "server.idle_unload_s: 1800"),
    "KV is stored": ("caching.md#on-disk", "prefix_cache.disk.max_bytes"),
    "back it up": ("maintenance.md#backup-and-restore", "tar -xzf mlx-stack-home.tar.gz"),
    "VS Code": ("clients/editors.md", "chatLanguageModels.json"),
    "JetBrains": ("clients/editors.md#jetbrains", "not tried"),
    "at login": ("running-as-a-service.md", "mlx-stack install"),
    "upgrade?": ("maintenance.md#upgrade", "What becomes of stored KV"),
    "uninstall?": ("maintenance.md#uninstall", "saved agents"),
    "read again": ("caching.md#headers-of-a-response", "mlx-stack cache why AGENT"),
    "preset of my own": ("presets.md#every-key", "slots.count"),
    "Prometheus": ("running-as-a-service.md#prometheus-and-grafana", "scrape_configs"),
    "Rerank": ("modes.md#embeddings", "Reranking is not served"),
    "GGUF": ("models.md#gguf-files-and-models-of-lm-studio-or-ollama", "GGUF is not read"),
    "thinking": ("models.md#thinking-on-or-off", "sampling.thinking=false"),
    "images": ("images.md", "chat --image FILE"),
    "license": ("../README.md", "Not licensed yet"),
}
"""Questions of people who run it: words of the row, its link, and a part of the answer there."""


def section(page: Path, anchor: str) -> str:
    """A page from the heading of an anchor to the next one of its level; all of it without one."""
    text = page.read_text(encoding="utf-8")
    if not anchor:
        return text
    parts = re.split(r"^(?=#+ )", text, flags=re.MULTILINE)
    index = [anchor_of(part.partition("\n")[0]) for part in parts].index(anchor)
    level = parts[index].partition(" ")[0]
    below = itertools.takewhile(lambda part: part.startswith(f"{level}#"), parts[index + 1 :])
    return parts[index] + "".join(below)


@pytest.mark.parametrize("question", ANSWERS)
def test_l2_the_index_answers_in_one_hop(question: str) -> None:
    link, answer = ANSWERS[question]
    index = ROOT / "docs" / "README.md"
    rows = [row for row in index.read_text(encoding="utf-8").splitlines() if row.startswith("| ")]
    (row,) = [row for row in rows if question in row.split("|")[1]]
    assert f"]({link})" in row
    file, _, anchor = link.partition("#")
    assert answer in section(index.parent / file, anchor)


def test_the_readme_says_that_there_is_no_license_as_long_as_there_is_none() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert ("Not licensed yet" in readme) is not any(ROOT.glob("LICENSE*"))


def test_l2_the_table_of_capacity_is_what_plan_prints() -> None:
    page = (ROOT / "docs" / "capacity.md").read_text(encoding="utf-8")
    table = page.split("<!-- plan --table -->\n```\n")[1].split("```")[0]
    printed = subprocess.run(
        [*CLI, "plan", "--table", "--ctx", "4096"], capture_output=True, text=True, check=True
    )
    # Types of mlx-vlm, where it is not installed.
    left_out = {line.partition(":")[0] for line in printed.stderr.splitlines()}
    assert left_out <= more_shapes.configs().keys()
    rows = [line.split() for line in table.splitlines()]
    assert [row for row in rows if row[0] not in left_out] == [
        line.split() for line in printed.stdout.splitlines()
    ]


def test_every_source_file_that_a_page_names_exists() -> None:
    named = {(page.name, file) for page in PAGES for file in SOURCE.findall(page.read_text())}
    assert named
    folders = (ROOT, ROOT / "mlxstack", ROOT / "tests")
    assert [name for name in named if not any((f / name[1]).exists() for f in folders)] == []


def test_every_test_that_a_page_names_exists() -> None:
    tests = "\n".join(file.read_text(encoding="utf-8") for file in ROOT.glob("tests/**/*.py"))
    named = {
        name
        for page in PAGES
        for name in re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8"))
    }
    assert {name for name in named if f"def {name}(" not in tests} == set()


def test_l3_troubleshooting_names_every_exit_code_and_status() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    codes = page.split("Exit codes")[1]
    for code in Exit:
        assert re.search(rf"\b{code.value}\b", codes), code
    for status in (400, 401, 403, 404, 409, 413, 500, 501, 503, 507, 529):
        assert re.search(rf"\b{status}\b", page), status
    for chapter in ("Memory", "Throughput", "Starvation", "Misses", "Errors"):
        assert f"## {chapter}" in page


def comparisons() -> list[list[str]]:
    """Rows of the tables of the comparison: server, fact, source, month."""
    page = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return [row for row in cells if row[0] != "server" and not set(row[0]) <= {"-"}]


def test_l4_every_row_has_a_source_and_a_month() -> None:
    for _, fact, source, month in comparisons():
        assert re.fullmatch(r"(Aug|Nov) 2026", month), fact
        links = re.findall(r"\]\(([^)]+)\)", source)
        assert links or re.search(r"`(test_\w+|mlx-stack bench dev \w+)`", source), fact
        outside = [link for link in links if link.startswith("http")]
        assert all(re.fullmatch(r"https://[\w.-]+/[\w./#-]+", link) for link in outside), fact


def test_l4_every_figure_of_ours_names_its_model_and_day() -> None:
    measured = ["`mlx-stack bench dev", "](benchmarks.md)"]
    rows = [row for row in comparisons() if any(source in row[2] for source in measured)]
    assert len(rows) >= 7
    for _, fact, _, _ in rows:
        assert re.search(r"\((SmolLM2 135M|random model), 2026-\d\d-\d\d\)", fact), fact


def test_l4_every_benchmark_that_a_row_names_exists() -> None:
    named = {
        name
        for row in comparisons()
        for name in re.findall(r"`mlx-stack bench dev (\w+)`", " ".join(row))
    }
    assert named and named <= set(NAMES)


def test_l4_no_row_of_ours_is_without_a_test_or_a_benchmark() -> None:
    ours = [row for row in comparisons() if row[0] == "mlx-stack" and "README" not in row[2]]
    assert len(ours) >= 5
    for _, fact, source, _ in ours:
        assert re.search(r"`test_\w+`", source) or "`mlx-stack bench dev" in source, fact


def test_l4_the_servers_that_people_run_are_compared_and_losses_come_first() -> None:
    page = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    servers = " ".join(row[0] for row in comparisons())
    for name in ("Ollama", "LM Studio", "oMLX", "Rapid-MLX", "Splash", "MTPLX", "vllm-metal"):
        assert name in servers
    assert re.findall(r"^## (.*)", page, re.MULTILINE)[0] == "Where mlx-stack loses"


def test_the_numbers_of_the_readme_are_those_of_the_benchmarks() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    measured = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    table = readme.split("| against mlx_lm.server")[1].split("\n\n")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines()[2:]]
    assert len(rows) == 8
    for n_agents in (1, 4):
        (row,) = [cells for cells in rows if f"turns per minute of {n_agents} " in cells[0]]
        ours, theirs = (cell.strip() for cell in row[1:3])
        line = rf"\| (SmolLM2.*)?\| {n_agents} \| {ours} \| {theirs} \|"
        assert re.search(line, measured), row
    figures = {
        "longest pause": ("1.57 s", "10.68 s"), "cold prompt": ("26.21 s", "52.90 s"),
        "next turn": ("797 ms", "1.57 s"), "same prompt again": ("14.3 ms", "407 ms"),
        "1 agent decodes": ("19.8 tokens/s", "18.1 tokens/s"),
        "8 agents decode": ("77.2 tokens/s", "73.3 tokens/s"),
    }  # fmt: skip
    for name, raw in figures.items():
        (row,) = [cells for cells in rows if name in cells[0]]
        for figure in raw:
            assert figure in measured, figure
            numbers = re.findall(r"([\d.]+) (?:s|tok/s)", "|".join(row))
            value = float(figure.split()[0]) / (1000 if "ms" in figure else 1)
            assert any(abs(float(number) - value) <= 0.03 * value for number in numbers), (
                figure,
                row,
            )


def test_the_first_screen_of_the_readme_has_picture_commands_numbers_and_status() -> None:
    screen = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:45])
    picture = re.search(r"!\[.*\]\((docs/img/\S+\.gif)\)", screen)
    assert picture is not None and (ROOT / picture[1]).read_bytes().startswith(b"GIF89a")
    (block,) = re.findall(r"```bash\n(.*?)```", screen, re.DOTALL)
    assert len(block.splitlines()) == 3
    assert "Status:" in screen and "Never run so far" in screen and screen.count("| ") > 10


@pytest.mark.net
def test_l1_the_commands_of_the_caching_page_run(tmp_path: Path) -> None:
    """Against the demo service, but those that ask about a request; FILE is what the reader has."""
    shell = Shell(tmp_path)
    del shell.env["MLX_STACK_WORKER"]
    assert shell.up().returncode == 0
    (shell.folder / "FILE").write_text("You are a careful assistant. " * 40)
    page = ROOT / "docs" / "caching.md"
    lines = [line for line in commands(page) if re.match(r"cache (?!why )", line)]
    assert len(lines) >= 3
    try:
        for line in dict.fromkeys(lines):
            done = shell.run(*shlex.split(line))
            assert done.returncode == 0, f"{line}: {done.stderr}"
    finally:
        shell.run("down")


def test_the_command_and_the_pages_say_the_same_of_an_upgrade() -> None:
    installation = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")
    maintenance = (ROOT / "docs" / "maintenance.md").read_text(encoding="utf-8")
    for text in (UPDATE, installation, maintenance):
        assert "git pull" in text and "`uv tool install --force .`" in text
    assert "uv tool upgrade mlx-stack" not in installation + maintenance
    assert "docs/installation.md" in UPDATE
