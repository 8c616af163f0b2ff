"""Exclusion of a folder from Time Machine."""

import ctypes
import logging
import os
import plistlib
from pathlib import Path

log = logging.getLogger(__name__)

ATTRIBUTE = b"com.apple.metadata:com_apple_backup_excludeItem"
"""As `tmutil addexclusion` sets it: the name of the program that excludes, a property list."""

VALUE = plistlib.dumps("com.apple.backupd", fmt=plistlib.FMT_BINARY)


def exclude_from_backups(folder: Path, platform: str) -> None:
    """Exclude a folder on macOS; a volume that cannot note it is logged."""
    if platform != "darwin":
        return
    call = ctypes.CDLL(None, use_errno=True).setxattr
    call.argtypes = (
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_uint32,
        ctypes.c_int,
    )
    if call(os.fsencode(folder), ATTRIBUTE, VALUE, len(VALUE), 0, 0):
        reason = os.strerror(ctypes.get_errno())
        log.info("Time Machine backs up %s: it cannot be excluded (%s)", folder, reason)
