"""Open listening sockets. The launcher does, so that they outlive the processes that serve them."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable

from conf.errors import LlmgwError
from conf.values import ListenAddress

BACKLOG = 2048
BIND_PATIENCE_S = 5.0
_RETRY_S = 0.1


class AddressUnavailable(LlmgwError):
    """Nothing can listen there: another program does, or the host does not have that address."""


def open_listeners(
    address: ListenAddress,
    key: str,
    *,
    patience_s: float = BIND_PATIENCE_S,
    on_wait: Callable[[], None] | None = None,
) -> list[socket.socket]:
    """Listen on every address that a configured one stands for.

    No host, or `::`, is one socket for IPv6 and IPv4 (IPv4 alone where the host has no IPv6). A name may
    stand for several addresses; one that the host does not have (`localhost` often names a ::1 that is not
    there) is left out as long as another is there. With port 0, all get the port that the first got.

    Blocks while an address is taken, since the workers of a killed launcher need a moment to let go of it.

    Args:
        address: from the configuration.
        key: its configuration key, for the message.
        patience_s: how long to try, in seconds.
        on_wait: called once if there is a reason to wait.

    Returns:
        Non-blocking sockets, not inheritable.

    Raises:
        AddressUnavailable: with a sentence for people.
    """
    deadline = time.monotonic() + patience_s
    waited = False
    while True:
        try:
            return _open_all(address)
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                raise AddressUnavailable(_sentence(address, key, exc)) from exc
        if on_wait and not waited:
            on_wait()
            waited = True
        time.sleep(_RETRY_S)


def written(listener: socket.socket) -> str:
    """Return a listener's address as `host:port` or `[IPv6]:port`."""
    host, port = listener.getsockname()[:2]
    return str(ListenAddress(host, port))


def _open_all(address: ListenAddress) -> list[socket.socket]:
    if address.host in ("", "::"):
        try:
            return [_listen(socket.AF_INET6, ("::", address.port), dual=True)]
        except OSError as exc:
            if address.host or exc.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                raise
        return [_listen(socket.AF_INET, ("0.0.0.0", address.port), dual=False)]
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[socket.socket] = []
    missing: OSError | None = None
    port = address.port
    try:
        for family, _, _, _, place in dict.fromkeys(found):
            try:
                listener = _listen(family, (place[0], port, *place[2:]), dual=False)
            except OSError as exc:
                if exc.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                missing = exc
                continue
            listeners.append(listener)
            port = listener.getsockname()[1]
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    if not listeners and missing:
        raise missing
    return listeners


def _listen(family: int, place: tuple[str | int, ...], *, dual: bool) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # Said either way: the default is the host's, net.ipv6.bindv6only.
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if dual else 1)
        listener.bind(place)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _sentence(address: ListenAddress, key: str, exc: OSError) -> str:
    place = f"{key}: cannot listen on {address}"
    if isinstance(exc, socket.gaierror):
        return f"{place}: the name {address.host!r} has no address ({exc.strerror})"
    if exc.errno == errno.EADDRINUSE:
        return f"{place}: another program listens there; stop it, or choose another address"
    if exc.errno == errno.EADDRNOTAVAIL:
        return f"{place}: this host does not have that address"
    if exc.errno == errno.EACCES:
        return f"{place}: ports below 1024 need the right to bind them (CAP_NET_BIND_SERVICE)"
    return f"{place}: {exc.strerror}"
