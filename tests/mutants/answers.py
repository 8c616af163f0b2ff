"""Protections of the web page and of the chat in a terminal."""

from tests.mutants.mutant import Mutant

MARKDOWN = "tests/api/test_markdown.py::"
PAGE = "tests/api/test_web_page.py::"
CHAT = "tests/cli/test_chat.py::"
IMAGES_OF_CHAT = "tests/cli/test_chat_images.py::"
TERMINAL = "tests/cli/test_answer_markdown.py::"

ANSWERS = (
    Mutant(
        "HTML in an answer stays text", "api/markdown.py",
        '{"html": False,', '{"html": True,',
        MARKDOWN + "test_html_is_text",
    ),
    Mutant(
        "an answer links to other sites alone", "api/markdown.py",
        'if node.tag == "a" and ADDRESS.match(href):', 'if node.tag == "a":',
        MARKDOWN + "test_hostile_texts_become_text_and_harmless_elements",
    ),
    Mutant(
        "a text for the web page is bounded", "api/web_page.py",
        "if len(data.text) > MAX_CHARACTERS:", "if False:",
        PAGE + "test_other_bodies_are_refused",
    ),
    Mutant(
        "Markdown is drawn for those with a key", "api/web_page.py",
        'opt={"is_early": True},', "opt=EARLY,",
        PAGE + "test_markdown_is_for_those_with_a_key",
    ),
    Mutant(
        "the web page parses no HTML", "api/web_page.py",
        "require-trusted-types-for 'script'; trusted-types 'none'", "",
        PAGE + "test_every_file_of_the_page_is_served_and_parses_no_html",
    ),
    Mutant(
        "the web page offers clients that fit", "api/static/snippets.js",
        "client.least_context <= context", "true",
        PAGE + "test_chromium_chats_and_shows_the_reuse_of_the_second_turn",
    ),
    Mutant(
        "an image is for models that take images", "cli/chat_session.py",
        "if not self.accepts_images:", "if False:",
        IMAGES_OF_CHAT + "test_a_model_without_eyes_says_so",
    ),
    Mutant(
        "an image of a chat is bounded", "cli/chat_images.py",
        "if len(data) > MAX_BYTES:", "if False:",
        IMAGES_OF_CHAT + "test_a_file_that_is_no_image_is_one_sentence",
    ),
    Mutant(
        "SIGTERM ends a chat in silence", "cli/chat_session.py",
        "if own is not None and own.cancelling():", "if False:",
        CHAT + "test_sigterm_ends_an_answer_in_silence",
    ),
    Mutant(
        "a terminal shows the addresses of an answer", "cli/answer_markdown.py",
        "hyperlinks=False", "hyperlinks=True",
        TERMINAL + "test_every_block_is_printed_once_however_it_comes",
    ),
)  # fmt: skip
