"""The chat of the web page in Chromium: widths, images, Markdown, hostile answers, switches."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.running import Running
from tests.api.test_web_page import send, value, wait_for
from tests.clients.stage import playing
from tests.tui.browser import CHROMIUM, Browser, chromium

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.net,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]

CODE = "def f(x):\n    return x  # " + "a long line " * 20
MARKDOWN = (
    f"# Title\n\nSome **bold** words and `code`, see [docs](https://example.com/a).\n\n```python\n{CODE}\n```\n\n"
    "| a | b |\n|---|---|\n"
    + "| cell of a table | another cell |\n" * 2
    + "\n- one\n- two\n\n"
    + "long" * 100
)
HOSTILE = (
    "<script>window.pwned = 1</script> <img src=x onerror='window.pwned = 1'>\n\n"
    "[a](javascript:window.pwned=1) [b](data:text/html,x) [c](https://example.com/) [d](/v1/a)\n\n"
    "![e](https://example.com/pixel.png)\n\n```html\n<script>window.pwned = 1</script>\n```\n\n"
    "<svg onload='window.pwned = 1'></svg> <iframe srcdoc='<script>parent.pwned=1</script>'>\n\n"
    + ">" * 3000 + " deep\n\n" + "- " * 3000 + "deep"
)  # fmt: skip
SCRIPT = [
    {"when": r"\[IMG_END\].*\[IMG_END\]", "say": "two pictures came"},
    {"when": r"\[IMG\]", "say": "a picture came"},
    {"when": "Speak as a parrot", "say": "a parrot speaks"},
    {"when": "hostile", "say": HOSTILE},
    {"when": "markdown", "say": MARKDOWN},
    {"when": "count", "say": " ".join(map(str, range(4000)))},
    {"when": ".", "say": "only words came", "think": "I think first."},
]
# A picture as a file of the page: drawn on a canvas, since the page may load none.
PICTURE = """
async function picture(name) {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 32;
  const blob = await new Promise((resolve) => canvas.toBlob(resolve));
  return new File([blob], name, { type: "image/png" });
}
async function transfer(...files) {
  const data = new DataTransfer();
  for (const file of files) data.items.add(file);
  return data;
}
"""
WIDTHS = [400, 800, 1280]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with playing(tmp_path_factory.mktemp("seeing"), SCRIPT, 16_384, sees=True) as live:
        yield live


@pytest.fixture(scope="module")
def browser(seeing: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as tab:
        # Only a page in front may use the clipboard.
        tab.call("Emulation.setFocusEmulationEnabled", enabled=True)
        rights = ["clipboardReadWrite", "clipboardSanitizedWrite"]
        tab.call("Browser.grantPermissions", origin=seeing.url, permissions=rights)
        yield tab


@pytest.fixture
def page(seeing: Running, browser: Browser) -> Browser:
    """The page, freshly loaded."""
    opened(browser, seeing.url)
    return browser


def opened(browser: Browser, url: str) -> None:
    browser.open(url)
    wait_for(browser, "document.getElementById('model')?.value")
    done(browser, f"{PICTURE} window.picture = picture; window.transfer = transfer;")
    done(
        browser, "document.addEventListener('securitypolicyviolation', (e) => (window.refused = e))"
    )


def done(browser: Browser, code: str) -> Any:
    """Value of statements that may wait; the last one begins with `return`."""
    answer = browser.call(
        "Runtime.evaluate", expression=f"(async () => {{ {code} }})()", awaitPromise=True
    )
    assert "exceptionDetails" not in answer, answer["exceptionDetails"]
    return answer["result"].get("value")


def sized(browser: Browser, width: int) -> None:
    browser.call(
        "Emulation.setDeviceMetricsOverride",
        width=width, height=800, deviceScaleFactor=1, mobile=False,
    )  # fmt: skip


def answered(browser: Browser, n: int = 1) -> str:
    """Text of the n-th answer, once it is there with its figures."""
    wait_for(browser, f"document.querySelectorAll('.figures').length >= {n}")
    wait_for(browser, "document.getElementById('stop').hidden")
    return str(value(browser, "[...document.querySelectorAll('.markdown')].at(-1).textContent"))


OVER = """
[...document.querySelectorAll('body *')].filter((one) => {
  const box = one.getBoundingClientRect();
  return box.width && box.right > innerWidth + 1 && !one.closest('.code, .table, .hidden-word');
}).map((one) => `${one.tagName}.${one.className} ${one.getBoundingClientRect().right}`).join()
"""


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_is_cut_at_the_right_edge(page: Browser, width: int, theme: str) -> None:
    sized(page, width)
    page.call(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}]
    )
    assert value(page, OVER) == ""
    send(page, "markdown, please")
    answered(page)
    done(page, "document.getElementById('system-details').open = true")
    assert value(page, OVER) == ""
    assert value(page, "document.documentElement.scrollWidth <= innerWidth")
    if value(page, "getComputedStyle(document.getElementById('info')).display") != "none":
        done(page, "document.getElementById('info').click()")
    assert value(page, "document.getElementById('snippets').getBoundingClientRect().width") > 200
    assert value(page, OVER) == ""
    assert value(page, "[...document.querySelectorAll('.snippet pre')].every("
                 "(one) => one.scrollWidth <= one.clientWidth)")  # fmt: skip


def test_markdown_is_drawn_and_each_block_of_code_is_copied(page: Browser) -> None:
    sized(page, 1280)
    send(page, "markdown, please")
    answered(page)
    last = "[...document.querySelectorAll('.markdown')].at(-1)"
    count = f"(tag) => {last}.querySelectorAll(tag).length"
    assert value(page, f"['h1','strong','code','table','li','figure'].map({count}).join()") == (
        "1,1,1,1,2,1"
    )
    copy = f"{last}.querySelector('figure button')"
    done(page, f"{copy}.click()")
    assert wait_for(page, f"{copy}.textContent === 'Copied'")
    assert done(page, "return await navigator.clipboard.readText()") == f"{CODE}\n"
    link = f"{last}.querySelector('a')"
    assert value(page, f"{link}.href") == "https://example.com/a"
    assert value(page, f"{link}.rel") == "noopener noreferrer nofollow"
    done(page, "[...document.querySelectorAll('footer button')].at(-1).click()")
    wait_for(
        page, "[...document.querySelectorAll('footer button')].at(-1).textContent === 'Copied'"
    )
    assert done(page, "return await navigator.clipboard.readText()") == MARKDOWN


def test_hostile_answers_do_nothing(page: Browser, seeing: Running) -> None:
    n_before = len(page.requests)
    send(page, "hostile, please")
    assert "<script>window.pwned = 1</script>" in answered(page)
    assert value(page, "window.pwned") is None and value(page, "window.refused") is None
    tags = value(page, "[...new Set([...document.querySelectorAll('#messages *')].map("
                       "(one) => one.tagName.toLowerCase()))].join()")  # fmt: skip
    assert not {"script", "img", "iframe", "svg", "style", "object"} & set(tags.split(","))
    links = "[...document.querySelectorAll('.markdown a[href]')].map((one) => one.href).join()"
    assert value(page, links) == "https://example.com/"
    assert all(url.startswith(seeing.url) for url in page.requests[n_before:])


WAYS = {
    "chosen": "const box = document.getElementById('files');"
    "box.files = (await transfer(await picture('a.png'))).files;"
    "box.dispatchEvent(new Event('change'));",
    "pasted": "document.getElementById('prompt').dispatchEvent(new ClipboardEvent('paste',"
    "{clipboardData: await transfer(await picture('a.png')), bubbles: true, cancelable: true}));",
    "dropped": "document.getElementById('chat').dispatchEvent(new DragEvent('drop',"
    "{dataTransfer: await transfer(await picture('a.png')), bubbles: true, cancelable: true}));",
}


@pytest.mark.parametrize("way", WAYS)
def test_an_image_goes_with_the_message(page: Browser, way: str) -> None:
    assert not value(page, "document.getElementById('attach').hidden")
    done(page, WAYS[way])
    wait_for(page, "document.querySelectorAll('#attachments canvas').length === 1")
    send(page, "What is it?")
    assert answered(page) == "a picture came"
    assert value(page, "document.querySelectorAll('#messages canvas').length") == 1
    assert value(page, "document.getElementById('attachments').hidden")
    assert value(page, "window.refused") is None


def test_images_are_removed_and_sent_without_words(page: Browser) -> None:
    done(page, WAYS["chosen"] + WAYS["dropped"] + WAYS["pasted"])
    wait_for(page, "document.querySelectorAll('#attachments li').length === 3")
    done(page, "document.querySelector('#attachments button').click()")
    done(page, "document.getElementById('prompt-form').requestSubmit()")
    assert answered(page) == "two pictures came"


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ("new File(['no picture'], 'a.png', {type: 'image/png'})", "no picture that can be read"),
        ("new File(['<svg/>'], 'a.svg', {type: 'image/svg+xml'})", "is no PNG, JPEG, WebP or GIF"),
        ("new File([new Uint8Array(9 << 20)], 'a.png', {type: 'image/png'})", "than 8 MiB"),
    ],
)
def test_a_file_that_is_no_image_is_one_sentence(page: Browser, file: str, sentence: str) -> None:
    done(page, WAYS["chosen"].replace("await picture('a.png')", file))
    wait_for(page, "!document.getElementById('notice').hidden")
    assert sentence in value(page, "document.getElementById('notice').textContent")
    assert value(page, "document.getElementById('attachments').hidden")


def test_a_model_without_eyes_is_sent_no_image(browser: Browser, tmp_path: Path) -> None:
    with playing(tmp_path / "blind", SCRIPT) as live:
        opened(browser, live.url)
        assert value(browser, "document.getElementById('attach').hidden")
        done(browser, WAYS["pasted"])
        wait_for(browser, "!document.getElementById('notice').hidden")
        assert "takes no images" in value(browser, "document.getElementById('notice').textContent")
        assert "mlx-stack run claude" in value(browser, "document.body.textContent")


def test_the_system_prompt_and_the_switch_of_thinking_reach_the_model(page: Browser) -> None:
    send(page, "Hello!")
    assert answered(page) == "only words came"
    assert value(page, "document.querySelectorAll('#messages details').length") == 1
    done(page, "document.getElementById('clear').click()")
    assert not value(page, "document.getElementById('empty').hidden")
    done(page, "document.getElementById('thinking').value = 'off'")
    send(page, "Hello!")
    assert answered(page) == "only words came"
    assert value(page, "document.querySelectorAll('#messages details').length") == 0
    done(page, "document.getElementById('clear').click()")
    done(page, "document.getElementById('system').value = 'Speak as a parrot.'")
    send(page, "Hello!")
    assert answered(page) == "a parrot speaks"


def test_slots_show_their_state_and_reuse(page: Browser) -> None:
    send(page, "Hello!")
    answered(page)
    wait_for(page, "document.querySelectorAll('#slots [data-state=good]').length >= 1")
    assert value(page, "document.querySelectorAll('#slots li').length") == 3
    label = "document.querySelector('#slots .fill').getAttribute('aria-label')"
    assert "of 16384 tokens" in value(page, label)
    assert value(page, "document.getElementById('state').textContent") == "ready"


def test_a_new_chat_forgets_an_answer_that_runs(page: Browser) -> None:
    send(page, "count")
    wait_for(page, "document.querySelector('.markdown').textContent.startsWith('0 1 2')")
    wait_for(page, "document.querySelectorAll('#slots [data-state=busy]').length === 1")
    done(page, "document.getElementById('clear').click()")
    wait_for(page, "document.getElementById('stop').hidden")
    send(page, "Hello!")
    assert answered(page) == "only words came"
    # The numbers of the answer before would be hundreds of tokens.
    n_prompt = value(page, "document.querySelector('.figures').textContent.split(' ')[0]")
    assert int(n_prompt) < 60


def test_a_stopped_answer_stays_and_says_so(page: Browser) -> None:
    send(page, "count")
    wait_for(page, "document.querySelector('.markdown').textContent.startsWith('0 1 2')")
    done(page, "document.getElementById('stop').click()")
    wait_for(page, "document.getElementById('stop').hidden")
    text = value(page, "document.querySelector('li.assistant').textContent")
    assert "0 1 2" in text and "Stopped." in text


def test_a_message_that_fails_comes_back(page: Browser) -> None:
    done(page, "document.getElementById('system').value = 'word '.repeat(40000)")
    done(page, WAYS["chosen"])
    wait_for(page, "document.querySelectorAll('#attachments canvas').length === 1")
    send(page, "What is it?")
    wait_for(page, "document.querySelector('li.error > p')")
    wait_for(page, "document.getElementById('stop').hidden")
    assert "context" in value(page, "document.querySelector('li.error > p').textContent")
    done(page, "document.getElementById('system').value = ''")
    assert value(page, "document.getElementById('prompt').value") == "What is it?"
    done(page, "document.getElementById('prompt-form').requestSubmit()")
    assert answered(page) == "a picture came"
