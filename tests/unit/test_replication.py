"""The socket of a walsender session."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from relay.source.replication import narrow


@contextlib.contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a TCP connection on this machine."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as here,
        server.accept()[0] as there,
    ):
        yield here, there


def clamp(end: socket.socket) -> int:
    return end.getsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP)


def test_the_kernel_takes_less_from_a_near_postgres() -> None:
    """And the connection goes on, with its blocking mode as it was."""
    with connected() as (here, there):
        here.setblocking(False)
        narrow(here.fileno())
        assert clamp(here) == 1 << 20
        there.sendall(b"more")
        here.setblocking(True)
        assert here.recv(100) == b"more"


def test_from_far_away_the_kernel_takes_what_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relay.source.replication._NEAR", 0)
    with connected() as (here, _):
        before = clamp(here)
        narrow(here.fileno())
        assert clamp(here) == before != 1 << 20


def test_what_is_no_tcp_stays_as_it_is() -> None:
    one, other = socket.socketpair()
    with one, other:
        narrow(one.fileno())
        other.send(b"more")
        assert one.recv(100) == b"more"
