"""Checks of a preset beyond types: values that do not go together."""

import ipaddress
import re
from collections.abc import Iterator

from mlxstack.config.preset_reflection import Keys
from mlxstack.core.preset import Preset, ServiceKind, Speculation

Violation = tuple[Keys, str]

FILES = ("tokens_file", "text_file", "messages_file")
"""Keys of a warm prefix for its file."""

HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
PEER_URL = re.compile(r"https?://[^\s/@?#]+/?")
DIGEST = re.compile(r"sha256:[0-9a-fA-F]{64}")


def violations(preset: Preset) -> Iterator[Violation]:
    """Key paths with what is wrong there, worded to follow the key."""
    yield from _draft(preset)
    yield from _hosts(preset)
    yield from _sizes(preset)
    yield from _warm(preset)
    yield from _server(preset)


def _draft(preset: Preset) -> Iterator[Violation]:
    drafts = {key: getattr(preset.model, key) for key in ("draft", "mtp")}
    for key, draft in drafts.items():
        if draft is None:
            continue
        if preset.kind is ServiceKind.EMBEDDING:
            yield ("model", key), f"is {draft}, but embeddings need no drafts; remove it"
        elif preset.speculation is Speculation.OFF:
            yield ("model", key), f"is {draft}, but drafts are off: set speculation: auto"
    if None not in drafts.values():
        yield ("model", "mtp"), "does not go with `model.draft`: remove one of the two"


def _hosts(preset: Preset) -> Iterator[Violation]:
    if not preset.hosts:
        return
    if len(preset.hosts) < 2:
        yield ("hosts",), "names one machine; name this one first, then the others, or none"
    if not all(HOST.fullmatch(host) for host in preset.hosts):
        yield ("hosts",), "must be host names or IPv4 addresses, without a port"
    combined = (
        (("kind",), preset.kind is ServiceKind.EMBEDDING),
        (("model", "adapter"), preset.model.adapter is not None),
        (("model", "mtp"), preset.model.mtp is not None),
        (("server", "peers"), bool(preset.server.peers)),
        (("server", "idle_unload_s"), preset.server.idle_unload_s is not None),
    )
    for keys, is_set in combined:
        if is_set:
            yield keys, "does not go with `hosts`: remove one of the two"


def _sizes(preset: Preset) -> Iterator[Violation]:
    n_ctx = preset.slots.n_ctx
    block = preset.prefix_cache.block_size
    if block % 16:
        yield ("prefix_cache", "block_size"), f"is {block}, but must be a multiple of 16"
    if preset.kv.quantized_start > n_ctx:
        yield (
            ("kv", "quantized_start"),
            f"is token {preset.kv.quantized_start}, beyond a slot of {n_ctx} tokens",
        )
    n_max = preset.sampling.max_tokens
    if n_max == 0:
        yield ("sampling", "max_tokens"), "is 0, but must be at least 1, or -1 for no limit"
    if n_max is not None and n_max > n_ctx:
        yield ("sampling", "max_tokens"), f"is {n_max}, but a slot holds {n_ctx} tokens"


def _warm(preset: Preset) -> Iterator[Violation]:
    names: set[str] = set()
    for position, prefix in enumerate(preset.prefix_cache.warm_prefixes):
        keys: Keys = ("prefix_cache", "warm_prefixes", position)
        kinds = [kind for kind in FILES if getattr(prefix, kind) is not None]
        if len(kinds) != 1:
            text = " and ".join(kinds) or "none of them"
            yield (
                keys,
                f"(`{prefix.name}`) gives {text}, but must give exactly one of {', '.join(FILES)}",
            )
        if prefix.name in {"", ".", ".."} or "/" in prefix.name:
            yield (*keys, "name"), f"is `{prefix.name}`, but must be a name without `/`"
        if prefix.name in names:
            yield (*keys, "name"), f"is `{prefix.name}` a second time; each needs its own name"
        names.add(prefix.name)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    if host in {"localhost", ""}:
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _server(preset: Preset) -> Iterator[Violation]:
    if not preset.server.host.strip():
        yield ("server", "host"), "is empty, but must be an address such as 127.0.0.1"
    if not (
        is_loopback(preset.server.host)
        or preset.server.api_keys
        or preset.server.allow_unauthenticated
    ):
        yield (
            ("server", "host"),
            f"is {preset.server.host}, which other machines reach, and no key is asked for: set "
            "server.api_keys (`mlx-stack key` makes one), or server.allow_unauthenticated: true",
        )
    for position, key in enumerate(preset.server.api_keys):
        text = key if isinstance(key, str) else key.key
        if not text.strip():
            yield ("server", "api_keys", position), "is empty; every request would match it"
        elif not (text.isascii() and text.isprintable()):
            yield ("server", "api_keys", position), "must be printable ASCII, as headers are"
        elif text.startswith("sha256:") and not DIGEST.fullmatch(text):
            yield ("server", "api_keys", position), "is no sha256: with 64 hex digits after it"
    for position, peer in enumerate(preset.server.peers):
        url = peer if isinstance(peer, str) else peer.url
        if not PEER_URL.fullmatch(url):
            yield (
                ("server", "peers", position),
                f"is {url}, but must be the URL of a service, such as http://127.0.0.1:7119",
            )
