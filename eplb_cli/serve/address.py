"""Where a server listens: is the place free, and is it our server that answers there."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import os
import socket
import ssl
import struct
import sys
import time
from pathlib import Path

from eplb_cli.errors import ServeError, UsageError
from eplb_cli.serve.arguments import EngineArguments
from eplb_cli.serve.session import holds, processes_of

__all__ = ["Connection", "require_free"]

_EVERY_ADDRESS = {None: "127.0.0.1", "": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
"""Where to ask a server that was told to listen on all addresses."""

_SIGHTINGS = 10
"""How often a connection must be seen in other hands."""


def require_free(arguments: EngineArguments) -> None:
    """Bind the address as vLLM will, and let it go.

    Raises:
        UsageError: there is no such port.
        ServeError: somebody else listens there, or nobody can.
    """
    if arguments.uds:
        if os.path.lexists(arguments.uds):
            raise ServeError("exists already", file=arguments.uds, rule="vLLM makes the socket of --uds itself")
        return
    if not 0 < arguments.port < 65536:
        raise UsageError(f"--port {arguments.port}", rule="a port is 1..65535")
    host = arguments.host or ""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # As vLLM does: connections of an earlier server that have not timed out yet are no hindrance.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, arguments.port))
            # Two may bind; one listens.
            probe.listen()
        except (OSError, UnicodeError) as error:
            where = f"{host} port {arguments.port}" if host else f"port {arguments.port}"
            raise ServeError(
                f"vLLM cannot listen on {where}: {getattr(error, 'strerror', None) or error}",
                hint="Stop what listens there, or choose another --port.",
            ) from None


class Connection(http.client.HTTPConnection):
    """An HTTP connection to the server of one session of processes, and to no other.

    Whoever takes the port between the check and vLLM's start would be sent the API key. Before the first byte is
    written, the kernel is asked whose the other end of this very connection is.

    Args:
        arguments: where vLLM was told to listen.
        session: the session that the server's processes belong to.
        timeout: seconds for each step.
    """

    def __init__(self, arguments: EngineArguments, session: int, timeout: float) -> None:
        host = _EVERY_ADDRESS.get(arguments.host, arguments.host)
        super().__init__("localhost" if arguments.uds else host, arguments.port, timeout=timeout)
        self._arguments, self._session = arguments, session

    def connect(self) -> None:
        """Connect, and make sure of the other end.

        Raises:
            OSError: nobody listens, or nobody has taken the connection yet.
            ServeError: it was taken by a process that we did not start.
        """
        if self._arguments.uds:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(self.timeout)
            self.sock.connect(self._arguments.uds)
            process, _, _ = struct.unpack("3i", self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            ours = process in processes_of(self._session)
        else:
            super().connect()
            ours = _taken_by(self.sock, self._session, time.monotonic() + float(self.timeout or 0))
        if not ours:
            self.close()
            raise ServeError(
                f"another process answers at {self._arguments.uds or f'port {self._arguments.port}'}",
                rule="it is not the server that was started, and was sent nothing",
                hint="Stop it, or choose another --port.",
            )
        if self._arguments.ssl_certfile:
            # Our own server on our own machine; its certificate is for its public name.
            self.sock = ssl._create_unverified_context().wrap_socket(self.sock)  # noqa: S323


def _taken_by(connection: socket.socket, session: int, deadline: float) -> bool:
    """Whether the process that accepted the connection is of the session.

    Raises:
        OSError: nobody has accepted it, or it was closed.
    """
    here, there = connection.getsockname()[:2], connection.getpeername()[:2]
    sightings = 0
    while True:
        inode = _inode_of(there, here)
        if inode is None or (sightings and not inode):
            raise ConnectionResetError("the connection was closed")
        if inode:
            if holds(session, f"socket:[{inode}]"):
                return True
            # A server that is ending has let go of a socket that is still there for a moment.
            sightings += 1
            if sightings == _SIGHTINGS:
                return False
        # Without an inode: established by the kernel, and waiting in the listener's queue.
        if time.monotonic() > deadline:
            raise TimeoutError("the connection was not accepted")
        time.sleep(0.01)


def _inode_of(local: tuple[str, int], remote: tuple[str, int]) -> int | None:
    """The inode of the TCP socket between two addresses; 0 before it is accepted, None when there is none."""
    ends = [(ipaddress.ip_address(host.partition("%")[0]), port) for host, port in (local, remote)]
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(FileNotFoundError), Path(table).open() as lines:
            next(lines)
            for line in lines:
                fields = line.split()
                if fields[1].endswith(f":{local[1]:04X}") and [_end(fields[1]), _end(fields[2])] == ends:
                    return int(fields[9])
    return None


def _end(text: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    """An address as /proc/net writes it: 32-bit words in the machine's byte order."""
    address, _, port = text.partition(":")
    words = [int(address[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(address), 8)]
    found = ipaddress.ip_address(b"".join(words))
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found, int(port, 16)
