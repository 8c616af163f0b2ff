"""Images in `chat`: by option, by command, by a dropped file; and what is no image."""

import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("PIL")

from PIL import Image

from mlxstack.cli.chat_images import named_files, paths_in
from mlxstack.text.images.bounds import MAX_BYTES
from tests.api.running import Running
from tests.cli.pseudo_terminal import Terminal
from tests.cli.terminal import Shell
from tests.cli.test_chat import PASTE, PASTED, XTERM
from tests.clients.stage import playing

SCRIPT = [
    {"when": r"\[IMG_END\].*\[IMG_END\]", "say": "two pictures came"},
    {"when": r"\[IMG\]", "say": "a picture came"},
    {"when": ".", "say": "only words came"},
]


def picture(file: Path, color: str = "teal") -> Path:
    """A small PNG."""
    data = io.BytesIO()
    Image.new("RGB", (64, 64), color).save(data, "PNG")
    file.write_bytes(data.getvalue())
    return file


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with playing(tmp_path_factory.mktemp("seeing"), SCRIPT, sees=True) as live:
        yield live


@pytest.fixture(scope="module")
def blind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with playing(tmp_path_factory.mktemp("blind"), SCRIPT) as live:
        yield live


@pytest.mark.mlx
@pytest.mark.net
def test_options_send_images_with_one_prompt(seeing: Running, shell: Shell, tmp_path: Path) -> None:
    first = picture(tmp_path / "a b.png")
    second = picture(tmp_path / "c.png", "red")
    ask = ("chat", "--url", seeing.url, "-p", "What is it?")
    assert shell.run(*ask).stdout == "only words came\n"
    done = shell.run(*ask, "--image", str(first))
    assert (done.returncode, done.stdout) == (0, "a picture came\n"), done.stderr
    assert (
        shell.run(*ask, "--image", str(first), "--image", str(second)).stdout
        == "two pictures came\n"
    )


@pytest.mark.mlx
@pytest.mark.net
def test_a_file_that_is_no_image_is_one_sentence(
    seeing: Running, shell: Shell, tmp_path: Path
) -> None:
    no_image = tmp_path / "words.png"
    large = tmp_path / "large.png"
    no_image.write_text("no picture")
    large.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(MAX_BYTES))
    for file, sentence in (
        (tmp_path / "none.png", "there is no file .*none.png; give the path of an image"),
        (tmp_path, "there is no file .*; give the path of an image"),
        (no_image, "words.png is no PNG, JPEG, WebP or GIF; convert it to PNG first"),
        (large, "large.png is larger than 8 MiB, the most of an image; scale it down"),
    ):
        done = shell.run("chat", "--url", seeing.url, "-p", "hi", "--image", str(file))
        assert (done.returncode, done.stdout) == (1, "")
        assert re.fullmatch(f"error: {sentence}\n", done.stderr), done.stderr


@pytest.mark.mlx
@pytest.mark.net
def test_a_model_without_eyes_says_so(blind: Running, shell: Shell, tmp_path: Path) -> None:
    file = picture(tmp_path / "a.png")
    done = shell.run("chat", "--url", blind.url, "-p", "hi", "--image", str(file))
    assert done.returncode == 1
    assert re.fullmatch(
        r"error: local-model at http://\S+ takes no images; `mlx-stack presets` lists models that "
        r"do\n",
        done.stderr,
    )
    chat = Terminal(shell, "chat", "--url", blind.url, **XTERM)
    chat.until(chat.prompt)
    chat.type(f"/image {file}")
    chat.until("takes no images")
    chat.type(f"what is {file}")
    chat.until("takes no images; the path is sent as text")
    assert "only words came" in chat.until("tok/s]")
    assert chat.close() == 0


@pytest.mark.mlx
@pytest.mark.net
def test_a_command_and_a_dropped_file_attach_images(
    seeing: Running, shell: Shell, tmp_path: Path
) -> None:
    file = picture(tmp_path / "Screen Shot.png")
    chat = Terminal(shell, "chat", "--url", seeing.url, **XTERM)
    chat.until(chat.prompt)
    chat.type(f"/image {file}")
    chat.until("goes with the next prompt")
    chat.type("What is it?")
    assert "a picture came" in chat.until("tok/s]")
    chat.type("And without?")
    assert "only words came" in chat.until("tok/s]")
    chat.until(chat.prompt)
    dropped = str(file).replace(" ", "\\ ")
    chat.press(b"What is " + PASTE + dropped.encode() + PASTED + b"?\r")
    chat.until("goes with the next prompt")
    assert "a picture came" in chat.until("tok/s]")
    chat.type("/image nothing.png")
    chat.until("there is no file nothing.png")
    chat.type("look at /no/such.png")
    chat.until("there is no file /no/such.png; the prompt is sent without an image")
    chat.until("tok/s]")
    assert chat.close() == 0


@pytest.mark.parametrize(
    "typed", ["{escaped}", "'{path}'", '"{path}"', "file://{quoted}", "what is {escaped}?"]
)
def test_paths_as_terminals_paste_them(tmp_path: Path, typed: str) -> None:
    file = picture(tmp_path / "Screen Shot.PNG")
    path = str(file)
    text = typed.format(
        path=path, escaped=path.replace(" ", "\\ "), quoted=path.replace(" ", "%20")
    )
    paths = paths_in(text)
    assert paths.files == (file,) and paths.missing == ()
    assert paths.text in ("Screen Shot.PNG", "what is Screen Shot.PNG?")
    assert named_files(path) == [file]


@pytest.mark.parametrize(
    "text",
    [
        "rename logo.png to icon.png", "don't touch it's", "open /etc/hosts", "", "'", '"""',
        f"/{'x' * 5000}", "see https://example.com/a.png", "a\\", "/bin/ls '-l",
    ],
)  # fmt: skip
def test_other_words_name_no_image(text: str) -> None:
    paths = paths_in(text)
    assert (paths.text, paths.files, paths.missing) == (text, (), ())
