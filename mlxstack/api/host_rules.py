"""Host and Origin rules against DNS rebinding and cross-site requests."""

import ipaddress
import re
import socket
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from mlxstack.core.errors import Forbidden
from mlxstack.core.preset import ServerSpec

LOOPBACK = r"localhost|[a-z0-9-]+\.localhost|127(?:\.\d{1,3}){3}|\[::1\]"
CONTAINER_HOSTS = frozenset({"host.docker.internal", "host.containers.internal"})
"""Container host names of Docker and Podman; `.internal` is no TLD."""
APP_SCHEMES = frozenset({"app", "file", "tauri", "vscode-webview", "vscode-file"})

HostRules = Callable[[Mapping[str, str], str | None], None]
"""Checks the headers of a request from a peer."""


def host_rules(server: ServerSpec) -> HostRules:
    """Refuse requests that a web page forged (DNS rebinding, CSRF).

    A Host may be a loopback name, any IP literal (a rebound page never has one), a configured name,
    or, for peers in private networks, a name of this machine that no domain registry can give away:
    see `_machine_names`. An Origin must be loopback, the Host itself, configured, or an app's; a
    name of this machine is not enough, since DNS or mDNS of a hostile network could give it to a
    page. The check raises Forbidden.
    """
    known = re.compile(host_pattern(server), re.IGNORECASE)
    machine_names = _machine_names(socket.gethostname())

    def check(headers: Mapping[str, str], peer: str | None) -> None:
        host = _bare(headers.get("host", "localhost"))
        if host.lower() in machine_names and not known.fullmatch(host) and _is_near(peer):
            # No Origin equals it.
            host = ""
        elif not (known.fullmatch(host) or _is_address(host)):
            raise Forbidden(
                f"host {host!r} is not served here; add it to server.allowed_hosts of the preset"
            )
        origin = headers.get("origin")
        if origin is not None and not _is_friend(origin, host, known):
            raise Forbidden(
                f"pages of {origin!r} may not use this service; "
                "add its host to server.allowed_hosts of the preset"
            )

    return check


def host_pattern(server: ServerSpec) -> str:
    """Regular expression for loopback and configured names."""
    if "*" in server.allowed_hosts:
        return ".*"
    return "|".join((LOOPBACK, *(re.escape(name) for name in server.allowed_hosts)))


def _machine_names(hostname: str) -> frozenset[str]:
    """Names of this machine: for containers, and in multicast DNS."""
    own = hostname.partition(".")[0].lower()
    return CONTAINER_HOSTS | ({f"{own}.local"} if own else set())


def _is_near(peer: str | None) -> bool:
    """True for a peer on this machine or in a private network."""
    if peer is None:
        return True
    try:
        address = ipaddress.ip_address(peer.partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_private


def _bare(host: str) -> str:
    """Host name without its port."""
    return re.sub(r":\d*$", "", host)


def _is_address(host: str) -> bool:
    """True for an IP address without a zone.

    Python takes any text after `%`.
    """
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return "%" not in host


def _is_friend(origin: str, host: str, known: re.Pattern[str]) -> bool:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    if parts.scheme in APP_SCHEMES:
        return True
    name = _bare(parts.netloc)
    return bool(name) and (name == host or known.fullmatch(name) is not None)
