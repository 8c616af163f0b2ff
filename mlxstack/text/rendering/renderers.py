"""Renders chat templates in child processes, under a budget for each request.

A template is a program of a model's author, which may loop in one conversation only. So every
rendering has limits of time, memory and size, and no thread of this process runs a template.
"""

import hashlib
import json
import logging
import pickle
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mlxstack.core.errors import Busy, TemplateOverrun
from mlxstack.text.limited_pool import LimitedPool, PoolLimits
from mlxstack.text.limited_process import Overrun
from mlxstack.text.normalize_messages import writable
from mlxstack.text.rendering.worker import REFUSED

log = logging.getLogger("mlxstack.text")

LIMIT_S = 1.0
"""CPU seconds for all renderings of a request; usual ones take milliseconds."""
WARY_LIMIT_S = 0.25
"""The same, for `WARY_S` after an overrun: further ones shall not occupy every thread."""
WARY_S = 60.0
QUICK_S = 0.5
"""CPU seconds after which a rendering is slow, the start of its process included."""
MAX_SLOW = 2
"""Slow renderings at a time; a further one is refused, so that threads are left for others."""
MAX_BYTES = 1024**3
"""Maximum memory of a rendering process."""
MIN_WRITTEN = 1 << 20
MAX_GROWTH = 64
"""A rendering has at most so many bytes, and so many for each byte of template and conversation."""
BUSY = "the chat template is slow, and busy with other conversations; try again"
LIMITS = PoolLimits(MAX_BYTES, QUICK_S, MAX_SLOW, n_idle=2, busy=BUSY)
MAX_REFUSED = 256


class TemplateRefusal(ValueError):
    """The template raised an error: it refuses the conversation, or is none."""


class _Budget(threading.local):
    left_s: float | None = None


class TemplateRenderers:
    """Processes that render, one for each thread that does. Thread-safe.

    `n_overruns` counts the renderings that exceeded a limit.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool = LimitedPool("mlxstack.text.rendering.worker", LIMITS)
        self._refused: OrderedDict[bytes, str] = OrderedDict()
        self._budget = _Budget()
        self._overran_at = -WARY_S
        self.n_overruns = 0

    def render(self, source: str, variables: dict[str, Any]) -> str:
        """The rendering. Raises TemplateRefusal, TemplateOverrun, Busy."""
        return self._answer(source, variables)

    def free_variables(self, source: str) -> dict[str, tuple[str, ...]]:
        """Variables that a template reads, and texts they are compared to.

        Raises as `render` does.
        """
        variables: dict[str, list[str]] = json.loads(self._answer(source, None))
        return {name: tuple(texts) for name, texts in variables.items()}

    @contextmanager
    def budget(self) -> Iterator[None]:
        """One budget for all renderings of this thread inside."""
        self._budget.left_s = self._limit()
        try:
            yield
        finally:
            self._budget.left_s = None

    def close(self) -> None:
        """End the idle processes."""
        self._pool.close()

    def _limit(self) -> float:
        is_wary = time.monotonic() - self._overran_at < WARY_S
        return WARY_LIMIT_S if is_wary else LIMIT_S

    def _answer(self, source: str, variables: dict[str, Any] | None) -> str:
        payload = pickle.dumps((source, variables), pickle.HIGHEST_PROTOCOL)
        if reason := self._refused and self._refused.get(_digest(payload)):
            raise TemplateOverrun(reason)
        left_s = self._budget.left_s
        limit_s = self._limit()
        if left_s is not None and left_s <= 0:
            raise TemplateOverrun(f"takes longer than {limit_s:g} s of CPU time")
        allowed_s = limit_s if left_s is None else left_s
        try:
            data, used_s = self._pool.request(payload, allowed_s)
        except Overrun as overrun:
            self._note(payload, str(overrun))
            raise TemplateOverrun(str(overrun)) from overrun
        except OSError as error:
            raise Busy(f"the prompt cannot be rendered now: {error.strerror}") from error
        if left_s is not None:
            self._budget.left_s = left_s - used_s
        # A template can spell half a character, which no tokenizer takes.
        text: str = writable(data[1:].decode("utf-8", "surrogatepass"))
        if data.startswith(REFUSED):
            raise TemplateRefusal(text)
        if len(data) > MIN_WRITTEN + MAX_GROWTH * len(payload):
            reason = f"writes {len(data) >> 20} MB"
            self._note(payload, reason)
            raise TemplateOverrun(reason)
        return text

    def _note(self, payload: bytes, reason: str) -> None:
        """Remember a request that overran: clients repeat it."""
        if self._budget.left_s is not None:
            self._budget.left_s = 0.0
        with self._lock:
            self.n_overruns += 1
            self._overran_at = time.monotonic()
            self._refused[_digest(payload)] = reason
            if len(self._refused) > MAX_REFUSED:
                self._refused.popitem(last=False)
        log.warning("the chat template %s; its process was ended", reason)


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=16).digest()


RENDERERS = TemplateRenderers()
"""The rendering processes of this process."""


def template_source(tokenizer: Any, *, has_tools: bool) -> str:
    """Jinja template of a tokenizer, which may have two; "" without."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = (template.get("tool_use") if has_tools else None) or template.get("default")
    return template if isinstance(template, str) else ""


def render_chat(
    tokenizer: Any, messages: list[dict[str, Any]], *, tools: Any, **variables: Any
) -> str:
    """The rendering of messages by the template of a mlx-lm TokenizerWrapper.

    A model without a Jinja template is rendered by the function that mlx-lm has for it. Raises as
    `TemplateRenderers.render` does, or an error of that function.
    """
    own = getattr(tokenizer, "_chat_template", None)
    if own is not None:
        return str(own(messages, tools=tools, continue_final_message=False, **variables))
    source = template_source(tokenizer, has_tools=bool(tools))
    if not source:
        raise TemplateRefusal("the tokenizer has no Jinja template")
    special = dict(getattr(tokenizer, "special_tokens_map", {}))
    values = {**special, "documents": None, **variables, "messages": messages, "tools": tools}
    return RENDERERS.render(source, values)
