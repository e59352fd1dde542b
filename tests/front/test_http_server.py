"""Listening: a busy port, a wrong name and missing rights are sentences that say what to do."""

from __future__ import annotations

import socket

import pytest
from kvyard.front.http_server import ListenError, address_of, bind


def test_a_free_port_is_found_and_told() -> None:
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        assert address_of(sock) == f"http://127.0.0.1:{port}"
        with pytest.raises(ListenError, match=f"port {port} on 127.0.0.1 is in use.*--port"):
            bind("127.0.0.1", port)


def test_a_port_is_free_again_at_once() -> None:
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            pass
    with bind("127.0.0.1", port) as again:
        assert again.getsockname()[1] == port


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.77"])
def test_a_foreign_address_is_refused(host: str) -> None:
    with pytest.raises(ListenError, match=r"not an address of this machine|cannot listen"):
        bind(host, 0)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_ipv6_addresses_stand_in_brackets() -> None:
    try:
        sock = bind("::1", 0)
    except ListenError:
        pytest.skip("no IPv6 address on this machine")
    with sock:
        assert address_of(sock).startswith("http://[::1]:")
