"""Fuzzes prompts: whoever spells special tokens in a text, a name or an argument makes no turn."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import Struct
from tokenizers import AddedToken, normalizers

from mlxstack.core.conversation import Conversation, Message, Role, Tool, ToolCall
from mlxstack.core.errors import BadRequest
from mlxstack.features.formats.answer_format import ModelAnswerFormat
from mlxstack.text.assembly import assemble_text
from mlxstack.text.prompt.prompt import PromptMaker, TokenizeOptions
from mlxstack.text.tokens.special_tokens import special_tokens_of
from tests.fuzz.dice import Dice
from tests.text import conftest as kinds

WIDE = str.maketrans({chr(code): chr(code + 0xFEE0) for code in range(0x21, 0x7F)})
GLUE = ("\ufdd0", "\u200d", "\u200b", "\ufeff", " ", "\n", "|", "<", "system", "a", "\ufdd0\ufdd0")


class Kind(Struct, frozen=True):
    """A tokenizer with its maker; `structure` are the tokens that make turns, `calls` some of
    them, `spellings` what a forger writes."""

    prompt_maker: PromptMaker
    structure: frozenset[int]
    calls: frozenset[int]
    spellings: tuple[str, ...]


@cache
def known() -> tuple[Kind, ...]:
    """Templates of four families, and two tokenizers that change letters before they look."""
    root = Path(tempfile.mkdtemp(prefix="fuzz-"))
    kinds_found = []
    for name, special, added, template, ends in (
        ("chatml", kinds.CHATML_SPECIAL, kinds.CHATML_ADDED, kinds.CHATML, "<|im_end|>"),
        ("harmony", kinds.HARMONY_SPECIAL, [], kinds.HARMONY, "<|return|>"),
        ("plain", kinds.PLAIN_SPECIAL, [], kinds.PLAIN, "<eos>"),
    ):
        for change in ("", "widened", "widened before"):
            folder = root / f"{name} {change}"
            folder.mkdir()
            backend = kinds.byte_level(special, added)
            if change:
                backend.normalizer = normalizers.NFKC()
            if change == "widened before":
                backend.add_special_tokens([AddedToken(text, normalized=True) for text in special])
            bos = {"bos_token": "<bos>"} if name == "plain" else {}
            kinds_found.append(
                _kind(kinds.loaded(folder, backend, template, {**bos, "eos_token": ends}))
            )
    backend = kinds.metaspace(kinds.MISTRAL_SPECIAL, [])
    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    kinds_found.append(_kind(kinds.loaded(root / "mistral", backend, kinds.MISTRAL, ends)))
    return tuple(kinds_found)


def forging(data: bytes) -> None:
    """Raises AssertionError when a text changed what turns a prompt has."""
    dice = Dice(data)
    kind = dice.pick(known())
    texts = [_text(dice, kind) for _ in range(9)]
    honest = _turns(kind, ["x"] * 9)
    turns = _turns(kind, texts)
    assert turns == honest, f"{texts}: {turns} and not {honest}"
    _check_alone(kind, texts[0])


def _check_alone(kind: Kind, text: str) -> None:
    tokens = kind.prompt_maker.tokenize(text, TokenizeOptions(parse_special=False))
    assert not kind.structure & {*tokens}, f"{text!r} was read as {tokens}"


def _text(dice: Dice, kind: Kind) -> str:
    """Never empty, and never white space at an end: a template may look at that."""
    parts = [dice.pick(kind.spellings + GLUE) for _ in range(dice.below(8))]
    return "x" + "".join(parts) + dice.take(dice.below(6)).decode("utf-8", "replace") + "x"


def _turns(kind: Kind, texts: list[str]) -> list[Any]:
    """The structural tokens of a prompt without those that an assistant may write itself."""
    try:
        prompt = kind.prompt_maker.make(_conversation(texts))
    except BadRequest as error:
        return [type(error)]
    counted = kind.structure - kind.calls
    return [*(token for token in prompt.tokens if token in counted), prompt.is_in_thinking]


def _conversation(texts: list[str]) -> Conversation:
    system, user, answer, thought, argument, name, result, last, about = texts
    call = ToolCall("call_1", "weather", {name: argument})
    return Conversation(
        messages=(
            Message(Role.SYSTEM, system),
            Message(Role.USER, user),
            Message(Role.ASSISTANT, answer, reasoning=thought, tool_calls=(call,)),
            Message(Role.TOOL, result, tool_call_id="call_1"),
            Message(Role.USER, last),
        ),
        tools=(Tool("weather", about, {"type": "object", "properties": {name: {}}}),),
    )


def _kind(tokenizer: Any) -> Kind:
    markup = special_tokens_of(tokenizer, ModelAnswerFormat(tokenizer))
    ids = tokenizer.convert_tokens_to_ids
    spelled = sorted(markup.structure)
    halves = [text[: len(text) // 2] for text in spelled] + [
        text[len(text) // 2 :] for text in spelled
    ]
    wide = [text.translate(WIDE) for text in spelled]
    return Kind(
        assemble_text(tokenizer).prompt_maker,
        frozenset(ids(text) for text in spelled),
        frozenset(ids(text) for text in markup.calls if text in markup.structure),
        (*spelled, *halves, *wide, *(text.upper() for text in spelled)),
    )
