"""The blocking client against a scripted peer on a real socket."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from kvyard.control.client import Client, ControlError, NotRunning
from kvyard.control.schema import PROTOCOL, Event

HELLO = b'{"type":"hello","protocol":%d,"version":"9","role":"admin","pid":1}\n' % PROTOCOL
Script = Callable[[socket.socket], None]


@contextlib.contextmanager
def peer(path: Path, script: Script) -> Iterator[None]:
    """Accept one connection in a thread and let `script` talk on it."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen(1)
    listening.settimeout(10)

    def run() -> None:
        with contextlib.suppress(OSError):
            connection, _ = listening.accept()
            with connection:
                connection.settimeout(10)
                script(connection)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        listening.close()
        thread.join(15)
        assert not thread.is_alive()


def lines(*answers: bytes) -> Script:
    """Greet; then for each request send the next answer."""

    def script(connection: socket.socket) -> None:
        connection.sendall(HELLO)
        reader = connection.makefile("rb")
        for answer in answers:
            reader.readline()
            connection.sendall(answer)

    return script


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


def test_a_call_sends_one_line_and_returns_the_result(path: Path) -> None:
    seen: list[bytes] = []

    def script(connection: socket.socket) -> None:
        connection.sendall(HELLO)
        seen.append(connection.makefile("rb").readline())
        connection.sendall(b'{"type":"response","id":1,"result":{"x":1}}\n')

    with peer(path, script), Client(path) as client:
        assert client.hello.version == "9"
        assert client.call("status", {"a": [1]}) == {"x": 1}
    assert msgspec.json.decode(seen[0]) == {"id": 1, "method": "status", "params": {"a": [1]}}


def test_a_reply_in_small_pieces_and_two_in_one_are_both_understood(path: Path) -> None:
    def script(connection: socket.socket) -> None:
        for byte in HELLO:
            connection.sendall(bytes([byte]))
        reader = connection.makefile("rb")
        reader.readline()
        event = b'{"type":"event","topic":"status","at":1.5,"data":{}}\n'
        connection.sendall(event + event + b'{"type":"response","id":1,"result":7}\n' + event)
        reader.readline()
        connection.sendall(b'{"type":"response","id":2,"result":8}\n')

    with peer(path, script), Client(path) as client:
        assert client.call("a") == 7
        assert client.call("b") == 8


def test_a_large_reply_arrives_whole(path: Path) -> None:
    big = b'{"type":"response","id":1,"result":"%s"}\n' % (b"x" * 20_000_000)
    with peer(path, lines(big)), Client(path) as client:
        assert len(client.call("dump")) == 20_000_000


def test_an_error_is_raised_with_its_hint(path: Path) -> None:
    answer = b'{"type":"response","id":1,"error":{"code":"forbidden","message":"no","hint":"ask"}}\n'
    with peer(path, lines(answer)), Client(path) as client, pytest.raises(ControlError) as caught:
        client.call("drain")
    assert (caught.value.code, caught.value.message, caught.value.hint) == ("forbidden", "no", "ask")


def test_a_stream_gives_events_then_the_result(path: Path) -> None:
    answer = (
        b'{"type":"event","topic":"generate","at":1.0,"data":{"text":"a"}}\n'
        b'{"type":"response","id":1,"result":{"text":"a"}}\n'
    )
    with peer(path, lines(answer)), Client(path) as client:
        items = list(client.stream("generate"))
    assert isinstance(items[0], Event) and items[0].data == {"text": "a"}
    assert items[1] == {"text": "a"}


def test_a_subscription_yields_what_comes(path: Path) -> None:
    answer = (
        b'{"type":"response","id":1,"result":{}}\n' + b'{"type":"event","topic":"t","at":1.0,"data":{"n":1}}\n' * 3
    )
    with peer(path, lines(answer)), Client(path) as client:
        events = client.subscribe(["t"])
        assert [next(events).data["n"] for _ in range(3)] == [1, 1, 1]
        with pytest.raises(NotRunning):
            next(events)


def test_nobody_there(path: Path) -> None:
    with pytest.raises(NotRunning) as caught:
        Client(path)
    assert str(path) in caught.value.message
    assert "kvyard serve" in caught.value.hint


def test_a_left_over_socket_is_told_apart(path: Path) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    with pytest.raises(NotRunning, match="left-over"):
        Client(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open every socket")
def test_a_socket_of_others_says_what_to_do(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen(1)
        path.chmod(0)
        with pytest.raises(ControlError) as caught:
            Client(path)
    assert caught.value.code == "forbidden"


def test_a_silent_daemon_times_out(path: Path) -> None:
    def script(connection: socket.socket) -> None:
        connection.sendall(HELLO)
        connection.recv(1000)
        connection.recv(1)  # until the client goes

    with peer(path, script), Client(path, timeout=0.1) as client, pytest.raises(ControlError) as caught:
        client.call("status")
    assert caught.value.code == "timeout"


def test_a_slow_trickle_does_not_outwait_the_timeout(path: Path) -> None:
    def script(connection: socket.socket) -> None:
        connection.sendall(HELLO)
        connection.recv(1000)
        with contextlib.suppress(OSError):
            for _ in range(100):
                connection.sendall(b" ")
                threading.Event().wait(0.03)

    with peer(path, script), Client(path, timeout=0.2) as client, pytest.raises(ControlError) as caught:
        client.call("status")
    assert caught.value.code == "timeout"


def test_a_daemon_that_goes_away_is_not_running(path: Path) -> None:
    def script(connection: socket.socket) -> None:
        connection.sendall(HELLO)
        connection.recv(1000)

    with peer(path, script), Client(path) as client, pytest.raises(NotRunning, match="closed the connection"):
        client.call("status")


@pytest.mark.parametrize(
    "greeting", [b"HTTP/1.1 400\r\n", b"\n", b"{}\n", b'{"type":"event","topic":"","at":1,"data":{}}\n']
)
def test_something_else_at_the_socket(path: Path, greeting: bytes) -> None:
    with peer(path, lambda connection: connection.sendall(greeting)), pytest.raises(ControlError) as caught:
        Client(path)
    assert caught.value.code == "protocol"


def test_another_protocol_names_both(path: Path) -> None:
    hello = HELLO.replace(b'"protocol":1', b'"protocol":77')
    with peer(path, lambda connection: connection.sendall(hello)), pytest.raises(ControlError, match="77"):
        Client(path)


def test_a_refusal_instead_of_a_greeting(path: Path) -> None:
    refusal = b'{"type":"response","id":0,"error":{"code":"busy","message":"too many","hint":""}}\n'
    with peer(path, lambda connection: connection.sendall(refusal)), pytest.raises(ControlError, match="too many"):
        Client(path)


def test_the_error_said_before_hanging_up_is_read(path: Path) -> None:
    """LIFECYCLE-09: the peer refuses a long line and closes while the client still writes."""

    def script(connection: socket.socket) -> None:
        connection.sendall(HELLO)
        connection.recv(1000)
        connection.sendall(b'{"type":"response","id":0,"error":{"code":"too-large","message":"long","hint":""}}\n')

    with peer(path, script), Client(path) as client, pytest.raises(ControlError) as caught:
        client.call("status", {"x": "y" * 30_000_000})
    assert caught.value.code == "too-large"


def test_an_answer_to_another_question_is_not_taken(path: Path) -> None:
    answer = b'{"type":"response","id":5,"result":1}\n'
    with peer(path, lines(answer)), Client(path) as client, pytest.raises(ControlError, match="instead of"):
        client.call("status")


def test_closing_twice_is_fine(path: Path) -> None:
    with peer(path, lines()):
        client = Client(path)
        assert client.server_pid() == os.getpid()
        client.close()
        client.close()
