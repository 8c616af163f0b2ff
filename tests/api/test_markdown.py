"""Markdown as trees for the web page: blocks that grow, and hostile texts without effect."""

from collections.abc import Iterator

import msgspec
import pytest

from mlxstack.api.markdown import MAX_CHARACTERS, TAGS, Node, rendered

HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "a <b onclick=alert(1)>b</b>",
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1))",
    "[x](java\tscript:alert(1))",
    "[x](&#106;avascript:alert(1))",
    "[x](data:text/html,<script>alert(1)</script>)",
    "[x](data:image/png;base64,AAAA)",
    "[x](vbscript:x) [y](file:///etc/passwd) [z](//evil.com/x) [r](/v1/agents)",
    "<javascript:alert(1)>",
    "![x](https://evil.com/pixel.png)",
    '[x](https://a.b "t\\" onmouseover=alert(1)")',
    "```html\n<script>alert(1)</script>\n```",
    '``` "onload=x\n```',
    "<!-- <script>alert(1)</script> -->\n\n<iframe srcdoc='x'></iframe>",
]


def elements(nodes: list[Node]) -> Iterator[tuple[str, dict[str, str]]]:
    """Tag and attributes of all elements."""
    for node in nodes:
        if not isinstance(node, str):
            tag, attributes, *children = node
            yield tag, attributes
            yield from elements(children)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_become_text_and_harmless_elements(text: str) -> None:
    blocks = rendered(text)
    for tag, attributes in elements([*blocks.finished, *blocks.last]):
        assert tag in TAGS
        assert set(attributes) <= {"href", "start", "language"}
        assert attributes.get("href", "https://").startswith(("http://", "https://"))


def test_html_is_text() -> None:
    assert rendered("a <b>c</b>").last == [["p", {}, "a <b>c</b>"]]
    assert rendered("<script>x</script>").last == [["p", {}, "<script>x</script>"]]


@pytest.mark.parametrize(
    "text",
    [
        "[" * MAX_CHARACTERS, ">" * MAX_CHARACTERS, "- " * (MAX_CHARACTERS // 2),
        "*a_" * (MAX_CHARACTERS // 3), "![](" * (MAX_CHARACTERS // 4), "\n" * MAX_CHARACTERS,
        "".join("  " * n + "- x\n" for n in range(170)), "|a" * 5000 + "\n" + "|-" * 5000,
        "\ud800 \x00 \u202e",
    ],
)  # fmt: skip
def test_every_text_ends_in_a_tree_of_bounded_depth(text: str) -> None:
    blocks = rendered(text)

    def depth(node: Node) -> int:
        return 0 if isinstance(node, str) else 1 + max(map(depth, node[2:]), default=0)

    assert max(map(depth, [*blocks.finished, *blocks.last]), default=0) < 100


def test_a_text_that_grows_is_parsed_once_by_block() -> None:
    text = "# A 😀\n\nfirst *block*\n\n- one\n- two\n\n```python\na < b\n"
    blocks = rendered(text)
    assert blocks.finished == [
        ["h1", {}, "A 😀"],
        ["p", {}, "first ", ["em", {}, "block"]],
        ["ul", {}, ["li", {}, "one"], ["li", {}, "two"]],
    ]
    assert blocks.last == [["pre", {"language": "python"}, "a < b\n"]]
    units = text.encode("utf-16-le")
    rest = units[2 * blocks.n_finished :].decode("utf-16-le")
    assert rest == "```python\na < b\n"
    assert rendered(rest).last == blocks.last
    assert msgspec.json.encode(blocks)


def test_other_elements() -> None:
    blocks = rendered(
        "3. c\n\n| a |\n|---|\n| ~~b~~ |\n\n> q\n\n[x](https://a.b/c) ![alt](x.png)\\\nend"
    )
    assert blocks.finished[0] == ["ol", {"start": "3"}, ["li", {}, "c"]]
    assert blocks.finished[1][0] == "table" and ["s", {}, "b"] in blocks.finished[1][3][2][2]
    assert blocks.finished[2] == ["blockquote", {}, ["p", {}, "q"]]
    assert blocks.last == [
        ["p", {}, ["a", {"href": "https://a.b/c"}, "x"], " ", "[image: alt]", ["br", {}], "end"]
    ]
