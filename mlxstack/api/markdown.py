"""Markdown of answers as trees of elements for the web page.

The page parses no HTML: a text is a string, an element is a list of tag, attributes and children.
"""

import re
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode
from msgspec import Struct

MAX_CHARACTERS = 32_768
"""Text of one call: the parser takes up to a second for brackets of this length."""

MAX_NESTING = 40
"""Depth of lists and quotes; deeper text is left out."""

Node = str | list[Any]

PARSER = MarkdownIt("js-default", {"html": False, "linkify": False, "maxNesting": MAX_NESTING})
TAGS = frozenset({
    "p", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "hr", "br", "table",
    "thead", "tbody", "tr", "th", "td", "strong", "em", "s", "code", "pre", "a",
})  # fmt: skip
ADDRESS = re.compile(r"https?://", re.IGNORECASE)


class RenderedText(Struct, frozen=True):
    """Blocks of a text that grows.

    `finished` are those that stay as they are, the first `n_finished` UTF-16 units of the text;
    `last` is the block that may go on.
    """

    finished: list[Node]
    last: list[Node]
    n_finished: int


def rendered(text: str) -> RenderedText:
    """Parse a text of at most `MAX_CHARACTERS`."""
    blocks = SyntaxTreeNode(PARSER.parse(text)).children
    if not blocks:
        return RenderedText([], [], 0)
    *before, last = blocks
    finished = [node for block in before for node in _nodes(block)]
    lines = text.split("\n")[: last.map[0] if last.map else 0]
    n_finished = sum(len(line.encode("utf-16-le", "surrogatepass")) // 2 + 1 for line in lines)
    return RenderedText(finished, _nodes(last), n_finished)


def _nodes(node: SyntaxTreeNode) -> list[Node]:
    """Elements and texts of a node of the parser's tree."""
    leaf = _leaf(node)
    if leaf is not None:
        return [leaf]
    children = [block for child in node.children for block in _nodes(child)]
    if node.hidden or node.tag not in TAGS:
        return children
    return [[node.tag, _attributes(node), *children]]


def _leaf(node: SyntaxTreeNode) -> Node | None:
    """Text, code or image without its address, else None."""
    match node.type:
        case "text" | "text_special":
            return node.content
        case "softbreak":
            return "\n"
        case "image":
            return f"[image: {node.content}]"
        case "code_inline":
            return ["code", {}, node.content]
        case "fence" | "code_block":
            return ["pre", {"language": node.info.partition(" ")[0]}, node.content]
    return None


def _attributes(node: SyntaxTreeNode) -> dict[str, str]:
    """Address of a link, first number of a list."""
    href = str(node.attrs.get("href", ""))
    if node.tag == "a" and ADDRESS.match(href):
        return {"href": href}
    if node.tag == "ol" and "start" in node.attrs:
        return {"start": str(node.attrs["start"])}
    return {}
