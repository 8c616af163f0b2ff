"""API keys: kept as digests, compared in constant time."""

import hashlib
import secrets

from msgspec.structs import replace

from mlxstack.core.preset import ApiKey

DIGEST = "sha256:"


def as_key(key: str | ApiKey) -> ApiKey:
    """The key, with its digest instead of its text."""
    parsed = ApiKey(key) if isinstance(key, str) else key
    if parsed.key.startswith(DIGEST):
        return replace(parsed, key=parsed.key.lower())
    return replace(parsed, key=digest_of(parsed.key))


def fits(key: ApiKey, secret: str) -> bool:
    """Compare a given key with a configured one, in constant time."""
    return secrets.compare_digest(digest_of(secret), key.key)


def digest_of(key: str) -> str:
    """Digest of a key, as presets hold it."""
    return DIGEST + hashlib.sha256(key.encode()).hexdigest()
