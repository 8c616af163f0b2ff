"""Variables with the places of files: models, caches, certificates."""

import os
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

HOME = "HOME"
PLACES = (
    "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_XET_CACHE", "HF_TOKEN_PATH",
    "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
)  # fmt: skip
TEMPORARY = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")


def settle(variables: MutableMapping[str, str]) -> None:
    """Unset empty places, make relative ones absolute.

    Libraries take an empty place for the current folder, and a service has another one than the
    command that starts it.
    """
    for name in (HOME, *PLACES, *TEMPORARY):
        value = variables.get(name)
        if value:
            variables[name] = absolute(value)
        elif value is not None:
            del variables[name]
    for name in TEMPORARY:
        # Python looks elsewhere then, and the C++ of MLX fails.
        if name in variables and not Path(variables[name]).is_dir():
            del variables[name]


def absolute(place: str) -> str:
    """A place without variables, `~` and current folder."""
    path = Path(os.path.expandvars(place))
    # The home of a user that is not here stays as it is.
    with suppress(RuntimeError):
        path = path.expanduser()
    return str(path.absolute())
