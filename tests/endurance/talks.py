"""Random conversations of one client, for comparing a service with itself."""

import base64
from functools import cache
from io import BytesIO
from random import Random
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

MAX_TALKS = 12
HEADS = (470, 470, 120)
"""Words of the system messages; the long ones are longer than several blocks."""
MAX_MESSAGES = 12
WORDS = (
    "alpha", "beta", "gamma", "lake", "boat", "pear", "stone", "river", "house", "magic", "word",
    "remember", "hello", "weather", "Paris", "tool", "call", "<tool_call>", "</think>", "json", "1",
)  # fmt: skip
SIZES = ((16, 16), (64, 64), (96, 128), (256, 192))
"""Width and height of pictures; the smallest one has a single feature in Pixtral's family."""
N_PICTURES = 8
QUESTIONS = ("What is the magic word?", "Hello! Who are you?", "What is the weather in Paris?")
NAMES = ("lookup", "read_file", "weather")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}

Body = dict[str, Any]


class Talk(Struct, frozen=True):
    """A conversation, and the options that most of its requests have."""

    messages: tuple[Body, ...]
    options: Body
    extras: Body


def _tool(name: str) -> Body:
    properties = {"q": {"type": "string"}, "k": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties, "required": ["q"]}
    function = {"name": name, "description": f"Look up {name}", "parameters": parameters}
    return {"type": "function", "function": function}


class Talks:
    """Conversations that begin alike, fork, go back and go on, with pictures if `has_pictures`."""

    def __init__(self, random: Random, *, has_pictures: bool = False) -> None:
        self._random = random
        self._has_pictures = has_pictures
        self._beginnings = [random_words(Random(n), n_words) for n, n_words in enumerate(HEADS)]
        self._talks: list[Talk] = []
        self._latest = Talk((), {}, {})
        self.is_forked = False
        self.is_same = False
        """Whether the next request goes on with the last answer."""

    def next_request(self) -> tuple[Body, Body]:
        """A greedy request, and fields that must not change its answer."""
        random = self._random
        talk = self._continued()
        if not talk.extras or random.random() < 0.2:
            talk = replace(talk, options=self._manner(), extras=self._extras())
        self._latest = talk
        body: Body = {"messages": list(talk.messages), "temperature": 0, **talk.options}
        body["max_tokens"] = random.choice([1, 8, 40, 90, 90])
        return body | self._options("tools" in body), dict(talk.extras)

    def go_on(self, message: Body) -> None:
        """The client keeps an answer, with its thought or without, and the results of its calls."""
        random = self._random
        fields = {key: value for key, value in message.items() if value is not None}
        if random.random() < 0.5:
            fields.pop("reasoning_content", None)
        results = [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "content": self._shown(random_words(random, 12)),
            }
            for call in fields.get("tool_calls") or []
        ]
        random.shuffle(results)
        talk = replace(self._latest, messages=(*self._latest.messages, fields, *results))
        self._latest = talk
        if len(self._talks) < MAX_TALKS:
            self._talks.append(talk)
        else:
            self._talks[random.randrange(MAX_TALKS)] = talk

    def _continued(self) -> Talk:
        """A conversation that goes on, after a rewind or from its beginning now and then."""
        random = self._random
        choice = 0.5 if self.is_same else random.random()
        talk = random.choice(self._talks) if self._talks and choice < 0.85 else Talk((), {}, {})
        talk = self._latest if self.is_same else talk
        messages = list(talk.messages)
        self.is_forked = len(messages) > 2 and choice < 0.2
        if choice < 0.2:
            messages = messages[: max(1, len(messages) - 2 * random.randrange(1, 3))]
        if not messages or len(messages) > MAX_MESSAGES:
            messages = [{"role": "system", "content": random.choice(self._beginnings)}]
        while messages and messages[-1]["role"] == "user":
            messages.pop()
        is_in_loop = messages and messages[-1]["role"] == "tool" and random.random() < 0.7
        if not is_in_loop:
            messages.append(self._question())
        return replace(talk, messages=tuple(messages))

    def _manner(self) -> Body:
        random = self._random
        manner: Body = {}
        if random.random() < 0.6:
            manner["tools"] = [_tool(name) for name in NAMES[: random.randrange(1, 4)]]
        if random.random() < 0.5:
            manner["chat_template_kwargs"] = {"enable_thinking": True}
        return manner

    def _extras(self) -> Body:
        random = self._random
        extras: Body = {"n": random.choice([1, 1, 1, 2])}
        if random.random() < 0.3:
            extras["agent"] = f"agent-{random.randrange(4)}"
        if random.random() < 0.2:
            extras["cache_salt"] = f"salt-{random.randrange(2)}"
        return extras

    def _question(self) -> Body:
        random = self._random
        word = random.choice(WORDS)
        remember = f"Remember the magic word: {word}. Reply with one short sentence."
        asked = random.choice([random_words(random, random.randrange(3, 60)), remember, *QUESTIONS])
        return {"role": "user", "content": self._shown(asked)}

    def _shown(self, text: str) -> str | list[Body]:
        """A content of the text, with pictures before and within it now and then."""
        random = self._random
        if not self._has_pictures or random.random() < 0.6:
            return text
        images = [picture(random.randrange(N_PICTURES)) for _ in range(random.choice([1, 1, 2]))]
        before = [{"type": "text", "text": "seen:"}] if random.random() < 0.5 else []
        return [*before, *images, {"type": "text", "text": text}]

    def _options(self, has_tools: bool) -> Body:
        random = self._random
        options: Body = {}
        choice = random.random()
        if choice < 0.12:
            shape = {"name": "x", "schema": SCHEMA}
            options["response_format"] = {"type": "json_schema", "json_schema": shape}
        elif choice < 0.2 and has_tools:
            options["tool_choice"] = "required"
        elif choice < 0.45:
            # An answer that ends by itself: random models seldom do, and only then a turn is over.
            options["guided_choice"] = [random_words(random, random.randrange(8, 40))]
            options["tool_choice"] = "none"
            options["thinking_budget_tokens"] = random.choice([0, 6, 30])
            options["max_tokens"] = 300
        if random.random() < 0.1:
            options["stop"] = [random.choice(WORDS)]
        if random.random() < 0.15:
            options["ignore_eos"] = True
        if random.random() < 0.1:
            options["repetition_penalty"] = 1.3
        if random.random() < 0.1:
            options["logit_bias"] = {str(random.randrange(900)): random.choice([-5, 5])}
        if random.random() < 0.1:
            options["prediction"] = {"type": "content", "content": random_words(random, 8)}
        return options


@cache
def picture(number: int) -> Body:
    """Part of a content: a PNG of four colors, whose size depends on its number."""
    from PIL import Image  # only models that see need Pillow

    blocks = Image.frombytes("RGB", (2, 2), Random(number).randbytes(12))
    out = BytesIO()
    blocks.resize(SIZES[number % len(SIZES)], Image.Resampling.NEAREST).save(out, "PNG")
    data = base64.b64encode(out.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def has_picture(body: Body) -> bool:
    """Whether any message of the body shows one."""
    return any(isinstance(message.get("content"), list) for message in body["messages"])


def random_words(random: Random, n: int) -> str:
    """A text of `n` random words."""
    return " ".join(random.choice(WORDS) for _ in range(n))
