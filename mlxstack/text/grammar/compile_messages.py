"""Messages of llguidance about a grammar: errors and warnings."""

import json

from llguidance import LLMatcher

LEFT_OUT = "Unimplemented keys: "
"""Beginning of a warning of llguidance, before a JSON list and perhaps ` (2 times)`."""
APPROXIMATED = {
    "oneOf not fully supported": ("oneOf",),
    "min/maxProperties only supported": ("maxProperties", "minProperties"),
}
"""Beginnings of other warnings, and the keywords that they are about."""
MAX_REASON = 400
"""Characters of a message of llguidance."""


def warned_keywords(rules: LLMatcher) -> set[str]:
    """Keywords of schemas that llguidance reports as not enforced."""
    keywords: set[str] = set()
    for warning in rules.get_grammar_warnings():
        keywords |= _keywords_of(warning)
    return keywords


def _keywords_of(warning: str) -> set[str]:
    if warning.startswith(LEFT_OUT):
        keywords, _ = json.JSONDecoder().raw_decode(warning, len(LEFT_OUT))
        return set(keywords)
    for beginning, approximated in APPROXIMATED.items():
        if warning.startswith(beginning):
            return set(approximated)
    return set()


def error_reason(rules: LLMatcher) -> str:
    """Message of llguidance without the state of its parser and the grammar."""
    reason = rules.get_error().partition("<state>")[0].partition("\n\n")[0]
    return reason.partition("; following special tokens")[0].strip()[:MAX_REASON]
