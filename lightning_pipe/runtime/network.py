"""Over which network interface the ranks reach each other.

gloo listens on the address that the host's own name resolves to. On many machines that is one of
the loopback interface (Debian writes ``127.0.1.1`` into ``/etc/hosts``), which no other node can
reach; on others it does not resolve, or is one that the whole network can reach.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_VARIABLE = "GLOO_SOCKET_IFNAME"
_ELSEWHERE = "203.0.113.1"  # no host has it (RFC 5737): it only stands for all that is outside
_SIOCGIFADDR = 0x8915  # of Linux: the IPv4 address of an interface


@contextmanager
def gloo_interface(num_nodes: int, main_address: str) -> Iterator[None]:
    """Inside, new gloo groups use the interface that leads to the other ranks.

    On one node that is the loopback interface; on several, the one towards the node of rank 0.
    ``GLOO_SOCKET_IFNAME`` wins if the user has set it, for a second and faster network, say.

    Args:
        num_nodes: Of the world.
        main_address: Name or address of the node of rank 0.
    """
    given = os.environ.get(_VARIABLE)
    chosen = given or (_loopback() if num_nodes == 1 else interface_to(main_address))
    if chosen is not None:
        os.environ[_VARIABLE] = chosen
    try:
        yield
    except RuntimeError as error:
        if "connectFullMesh" in str(error):
            error.add_note(
                f"lightning_pipe: gloo used the network interface {chosen!r} of this node. If the "
                f"other nodes cannot reach it, set {_VARIABLE} on this node to the name of one "
                "that they can (`ip addr` lists them)."
            )
        raise
    finally:
        if given is None:
            os.environ.pop(_VARIABLE, None)


def interface_to(host: str) -> str | None:
    """The name of the interface that packets to a host leave by; nothing is sent.

    The host may be this one. If only its own files say that it is at a loopback address, the other
    nodes reach it by the interface that leads elsewhere.

    Args:
        host: A name or an address.

    Returns:
        A name, or ``None`` if it cannot be found out.
    """
    source = _source_address(host)
    if source is not None and source.is_loopback and not _is_loopback(host):
        source = _source_address(_ELSEWHERE) or source
    if source is None:
        return None
    return _loopback() if source.is_loopback else _interface_of(source)


_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _loopback() -> str | None:
    return "lo" if "lo" in {name for _, name in socket.if_nameindex()} else None


def _is_loopback(host: str) -> bool:
    """Whether a user says that all ranks are on one machine."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _source_address(host: str) -> _Address | None:
    """This host's address, as the other one sees it."""
    with suppress(OSError):
        for family, kind, protocol, _, target in socket.getaddrinfo(
            host, 9, type=socket.SOCK_DGRAM
        ):
            with suppress(OSError), socket.socket(family, kind, protocol) as sock:
                sock.connect(target)  # only looks for a route
                return ipaddress.ip_address(sock.getsockname()[0].partition("%")[0])
    return None


def _interface_of(address: _Address) -> str | None:
    """Which interface has an address."""
    if sys.platform != "linux":
        return None
    if address.version == 6:
        file = Path("/proc/net/if_inet6")
        lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        return next((name for digits, *_, name in lines if int(digits, 16) == int(address)), None)
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if _ipv4_address(name) == address), None)


def _ipv4_address(interface: str) -> _Address | None:
    import fcntl  # not on Windows

    request = struct.pack("256s", interface.encode()[:15])
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)
        return ipaddress.IPv4Address(answer[20:24])
    return None
