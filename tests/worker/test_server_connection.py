from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from tests.servers.fake import Fake
from tests.servers.lane import Clock
from workbench.errors import Cancelled, ConfigurationError, EngineError, WorkbenchError
from workbench.worker.servers.address import parse_address, read_key
from workbench.worker.servers.connection import Connection, Gone, Refused
from workbench.worker.servers.wire import Lost

KEY = "sk-very-secret"


@pytest.fixture
def fake() -> Iterator[Fake]:
    with Fake("vllm") as server:
        yield server


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def connect() -> Iterator[type[Connection]]:
    made: list[Connection] = []

    def connect(fake: Fake, key: str = "", timeout: float = 5.0) -> Connection:
        made.append(Connection(parse_address(fake.url), key, timeout))
        return made[-1]

    yield connect  # type: ignore[misc]
    for connection in made:
        connection.drop()


def waits(clock: Clock) -> list[float]:
    """The waits between tries, each slept in slices."""
    return [round(sum(part), 6) for part in _runs(clock.sleeps)]


def _runs(sleeps: list[float]) -> list[list[float]]:
    runs: list[list[float]] = []
    total, wanted = 0.0, 0.5
    for one in sleeps:
        if not runs or total >= wanted - 1e-9:
            wanted = min(8.0, 0.5 * 2 ** len(runs))
            runs.append([])
            total = 0.0
        runs[-1].append(one)
        total += one
    return runs


def test_a_connection_is_kept_and_one_that_was_closed_meanwhile_is_made_anew_at_once(
    fake: Fake, clock: Clock, connect
) -> None:
    connection = connect(fake)
    ends: set[int] = set()

    def note(path: str, number: int) -> None:
        ends.update(one.getpeername()[1] for one in fake._open)

    fake.fault = note
    for _ in range(5):
        connection.get("/version")
    assert len(ends) == 1 and len(fake.seen) == 5
    fake.stop()
    fake.start()
    connection.get("/version")
    assert clock.sleeps == [] and connection.losses == 0


def test_a_refused_connection_is_tried_again_with_growing_waits_until_the_time_is_up(
    fake: Fake, clock: Clock, connect
) -> None:
    connection = connect(fake)
    connection.get("/version")
    fake.stop()
    with pytest.raises(Gone, match="no answer for 60 s: the connection was refused") as caught:
        connection.get("/version")
    assert waits(clock)[:6] == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0]
    assert clock.now == pytest.approx(60.0)
    assert "goes on where it stopped" in caught.value.next


def test_an_address_where_nothing_ever_answered_is_given_up_sooner(fake: Fake, clock: Clock, connect) -> None:
    connection = connect(fake)
    fake.stop()
    with pytest.raises(Gone, match="no answer for 10 s: the connection was refused"):
        connection.get("/version")
    assert clock.now == pytest.approx(10.0)


def test_a_server_that_is_back_after_ten_seconds_answers(fake: Fake, clock: Clock, connect) -> None:
    connection = connect(fake)
    connection.get("/version")
    fake.stop()
    clock.at(10.0, fake.start)
    assert connection.get("/version") == {"version": "1.2.3"}
    assert 10 <= clock.now < 20 and connection.losses > 0


@pytest.mark.parametrize("fault", ["drop", "half"])
def test_an_answer_that_breaks_off_is_asked_for_again(fault: str, fake: Fake, clock: Clock, connect) -> None:
    fake.fault = lambda path, number: fault if number < 3 else None
    assert connect(fake).get("/version") == {"version": "1.2.3"}
    assert clock.now == pytest.approx(1.5)


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_busy_server_is_waited_for_as_long_as_it_asks(status: int, fake: Fake, clock: Clock, connect) -> None:
    fake.fault = lambda path, number: (status, {"Retry-After": "3"}, b"busy") if number < 3 else None
    assert connect(fake).get("/version") == {"version": "1.2.3"}
    assert clock.now == pytest.approx(6.0)


def test_a_server_that_asks_to_wait_longer_than_is_waited_ends_it_at_once(fake: Fake, clock: Clock, connect) -> None:
    fake.fault = lambda path, number: (429, {"Retry-After": "3600"}, b"{}")
    with pytest.raises(Gone, match="asks to wait 3600 s"):
        connect(fake).get("/version")
    assert clock.now == 0


def test_an_unclear_failure_of_the_server_is_tried_twice_again_and_a_wrong_request_never(
    fake: Fake, clock: Clock, connect
) -> None:
    fake.fault = lambda path, number: 500
    with pytest.raises(Refused, match="500: scripted 500"):
        connect(fake).get("/version")
    assert fake.counts["/version"] == 3
    for status in (400, 404, 422):
        fake.counts.clear()
        fake.fault = lambda path, number, status=status: status
        with pytest.raises(Refused, match=f"{status}: scripted"):
            connect(fake).get("/version")
        assert fake.counts["/version"] == 1


def test_a_silent_server_is_given_up_and_a_cancel_ends_the_wait(fake: Fake, clock: Clock, connect) -> None:
    fake.fault = lambda path, number: "wait"
    connection = connect(fake, timeout=0.3)
    connection.retry_seconds = 0.1
    with pytest.raises(Gone, match=r"no byte for 0.3 s"):
        connection.get("/version")
    fake.waiting.clear()
    connection = connect(fake, timeout=60.0)
    wanted = threading.Event()

    def look() -> None:
        if fake.waiting.is_set():
            wanted.set()
            raise Cancelled("cancelled")

    connection.look = look
    with pytest.raises(Cancelled):
        connection.get("/version")
    assert wanted.is_set() and connection._link is None


def test_a_cancel_ends_the_wait_between_two_tries(fake: Fake, clock: Clock, connect) -> None:
    connection = connect(fake)
    fake.stop()

    def look() -> None:
        if clock.now > 1:
            raise Cancelled("cancelled")

    connection.look = look
    with pytest.raises(Cancelled):
        connection.get("/version")
    assert clock.now < 2


def test_pages_that_are_no_json_are_told_harmlessly(fake: Fake, clock: Clock, connect) -> None:
    fake.fault = lambda path, number: "garbage"
    with pytest.raises(EngineError, match="not JSON") as caught:
        connect(fake).get("/version")
    assert "\x1b" not in str(caught.value)
    fake.fault = lambda path, number: "html"
    with pytest.raises(Gone, match="502 <html>") as caught:
        connect(fake).get("/version")
    assert "\x1b" not in str(caught.value) and "\x07" not in str(caught.value)
    for text in (b'{"a": NaN}', b"[" * 100000, b"\xff\xfe"):
        fake.fault = lambda path, number, text=text: (200, {}, text)
        with pytest.raises(EngineError, match="not JSON"):
            connect(fake).get("/version")


def test_an_answer_is_read_up_to_its_bound_only(fake: Fake, clock: Clock, connect) -> None:
    fake.fault = lambda path, number: "huge"
    with pytest.raises(EngineError, match="larger than 1,000 bytes"):
        connect(fake).post("/version", {}, 1000)
    fake.fault = lambda path, number: None
    with pytest.raises(EngineError, match="larger than 100 bytes"):
        list(connect(fake).stream("/v1/completions", {"prompt": [1], "max_tokens": 5, "stream": True}, 100))


def test_a_redirect_is_not_followed(fake: Fake, clock: Clock, connect) -> None:
    fake.fault = lambda path, number: "redirect"
    with pytest.raises(
        ConfigurationError, match=r"http://example.invalid/v1/completions, which is not followed"
    ) as caught:
        connect(fake, key=KEY).get("/version")
    assert "secret" not in str(caught.value) and len(fake.seen) == 1


def test_the_key_opens_the_server_and_stands_in_no_error(fake: Fake, clock: Clock, connect) -> None:
    fake.key = KEY
    assert connect(fake, key=KEY).get("/version") == {"version": "1.2.3"}
    with pytest.raises(ConfigurationError, match=r"401.*give key_env="):
        connect(fake).get("/version")
    fake.key = "another"
    with pytest.raises(ConfigurationError, match=r"401.*see key_env") as caught:
        connect(fake, key=KEY).get("/version")
    assert KEY not in str(caught.value) and "***" in str(caught.value)
    fake.fault = lambda path, number: (200, {}, f"not json {KEY}".encode())
    fake.key = ""
    with pytest.raises(EngineError) as told:
        connect(fake, key=KEY).get("/version")
    assert KEY not in str(told.value)


def test_a_stream_that_breaks_off_has_given_what_came(fake: Fake, clock: Clock, connect) -> None:
    body = {"prompt": [1, 2], "max_tokens": 6, "stream": True}
    fake.fault = lambda path, number: "drop_stream"
    connection = connect(fake)
    seen = []
    with pytest.raises(Lost):
        for event in connection.stream("/v1/completions", body):
            seen.append(event)  # noqa: PERF402
    assert len(seen) == 3 and connection.losses == 1
    fake.fault = lambda path, number: None
    fake.change = lambda path, event: {"error": {"message": "out of \x1b[0m blocks"}}
    with pytest.raises(EngineError, match=r"ends its stream: out of  ?.0m blocks"):
        list(connect(fake).stream("/v1/completions", body))


def test_what_does_not_speak_http_is_given_up(clock: Clock) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def play() -> None:
            while True:
                try:
                    other, _ = server.accept()
                except OSError:
                    return
                with other:
                    other.sendall(b"SSH-2.0-OpenSSH\r\n")

        thread = threading.Thread(target=play, daemon=True)
        thread.start()
        connection = Connection(parse_address(f"http://127.0.0.1:{server.getsockname()[1]}"), timeout=2)
        with pytest.raises(Gone, match=r"does not speak HTTP|was closed"):
            connection.get("/version")
        connection.drop()
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        ("https://host/proxy/v1", "https://host:443/proxy"),
        ("http://[::1]:9", "http://[::1]:9"),
    ],
)
def test_an_address_is_taken_apart(url: str, shown: str) -> None:
    assert str(parse_address(url)) == shown


@pytest.mark.parametrize(
    "url",
    ["http://", "ftp://a", "http://a:b", "http://a b", "http://a/?q=1", "http://me:hunter2@host:1", "http://me@host"],
)
def test_what_is_no_plain_address_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_address(url)
    assert "hunter2" not in str(caught.value) and "me@" not in str(caught.value)


def test_a_key_comes_from_the_environment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_TEST_KEY", f" {KEY}\n")
    assert read_key("WORKBENCH_TEST_KEY") == KEY and read_key("") == ""
    for value in ("", "two words", "a\r\nX-Evil: 1", "schlüssel"):
        monkeypatch.setenv("WORKBENCH_TEST_KEY", value)
        with pytest.raises(WorkbenchError) as caught:
            read_key("WORKBENCH_TEST_KEY")
        assert "Evil" not in str(caught.value)
