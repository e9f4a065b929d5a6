"""Receivers of results: a webhook, or a topic of an MQTT broker.

Only the configured address is contacted; redirects and the environment's proxies are ignored.
Messages and logs name scheme, host and port alone, because the rest of an address may be secret.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import importlib.util
import logging
import socket
import ssl
import threading
from abc import ABC, abstractmethod
from contextlib import closing, suppress
from urllib.parse import unquote, urlsplit

from anomaly.errors import AnomalyError, why
from anomaly.line.record import Record
from anomaly.runtime import __version__

log = logging.getLogger(__name__)

_SECONDS = 5.0  # for a row and its answer; with MQTT for each step
_ABOUT_THE_ROW = (400, 413, 422)  # statuses of a webhook that refuse the row itself
_DEFAULT_PORTS = {"http": 80, "https": 443, "mqtt": 1883, "mqtts": 8883}


class NotTakenError(AnomalyError):
    """A receiver hasn't accepted a row; `for_good` if it refuses the row itself at each try."""

    def __init__(self, message: str, *, for_good: bool = False) -> None:
        super().__init__(message)
        self.for_good = for_good


class Sink(ABC):
    """A receiver of rows.

    Args:
        url: the address; may hold a user and a password for the receiver.
        option: the option that gave the address, for messages.

    Raises:
        AnomalyError: the address is invalid.

    Attributes:
        shown: the receiver's name in messages: scheme, host and port.
        name: identifies the receiver after a restart, too; holds no password.
    """

    def __init__(self, url: str, option: str, schemes: tuple[str, ...]) -> None:
        try:
            parts = urlsplit(url)
            self._port = parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)
            self._host = parts.hostname or ""
            self._host.encode("idna")  # as looking it up will
        except ValueError:  # also UnicodeError, of idna
            parts, self._host = urlsplit(""), ""  # an empty address, which is refused below
        plain = url.isascii() and url.isprintable() and " " not in url
        if parts.scheme not in schemes or not self._host or not plain:
            raise AnomalyError(
                f"{option} takes an address with {' or '.join(schemes)}, a valid host and no spaces"
            )
        self._parts = parts
        self._login = [unquote(parts.username or ""), unquote(parts.password or "")]
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.shown = f"{parts.scheme}://{host}:{self._port}"
        # Without the query, which may hold a key that changes.
        self.name = f"{self.shown} {hashlib.sha256((parts.path or '/').encode()).hexdigest()[:8]}"

    @abstractmethod
    def send(self, message: bytes, key: str) -> None:
        """Deliver a row, on a connection of its own.

        Args:
            message: the row as JSON.
            key: the same whenever this row is sent.

        Raises:
            NotTakenError: the receiver hasn't confirmed the row.
        """


class Webhook(Sink):
    """A POST request for each row, which any 2xx status confirms; see `Sink`."""

    def __init__(self, url: str) -> None:
        super().__init__(url, "--webhook", ("http", "https"))
        query = f"?{self._parts.query}" if self._parts.query else ""
        self._target = f"{self._parts.path or '/'}{query}"
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        self._headers["User-Agent"] = f"anomaly/{__version__}"
        if self._parts.username is not None:
            basic = base64.b64encode(":".join(self._login).encode()).decode()
            self._headers["Authorization"] = f"Basic {basic}"

    def send(self, message: bytes, key: str) -> None:
        """Send the row with the key as `Idempotency-Key`; see `Sink.send`."""
        is_https = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if is_https else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=_SECONDS)
        late = threading.Event()

        def give_up() -> None:
            late.set()
            with suppress(OSError, AttributeError):  # AttributeError: it isn't open
                connection.sock.shutdown(socket.SHUT_RDWR)

        # A limit for the whole exchange: an answer byte by byte would hold up the other rows.
        limit = threading.Timer(_SECONDS, give_up)
        limit.start()
        try:
            with closing(connection):
                headers = self._headers | {"Idempotency-Key": key}
                connection.request("POST", self._target, message, headers)
                status = connection.getresponse().status
            if late.is_set():
                raise TimeoutError
        except (OSError, http.client.HTTPException) as error:
            raise NotTakenError(_reason(TimeoutError() if late.is_set() else error)) from None
        finally:
            limit.cancel()
        if 200 <= status < 300:
            return
        hint = ", and no redirect is followed" if 300 <= status < 400 else ""
        raise NotTakenError(f"it answers {status}{hint}", for_good=status in _ABOUT_THE_ROW)


class Mqtt(Sink):
    """MQTT 3.1.1: a message with QoS 1 for each row, which the broker confirms.

    Args:
        url: `mqtt://` or, with TLS, `mqtts://`, with the topic as its path; see `Sink`.

    Raises:
        AnomalyError: the address is invalid, or paho-mqtt isn't installed.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url, "--mqtt", ("mqtt", "mqtts"))
        self._topic = unquote(self._parts.path.lstrip("/"))
        if not self._topic or self._parts.query or set("+#\0") & set(self._topic):
            raise AnomalyError(
                "--mqtt needs a topic without + and # after the host: mqtt://HOST/factory/line-1"
            )
        if importlib.util.find_spec("paho") is None:
            raise AnomalyError("--mqtt needs paho-mqtt: pip install 'anomaly[mqtt]'")

    def send(self, message: bytes, key: str) -> None:
        """Publish the row, without the key: it holds its own `id`. See `Sink.send`."""
        from paho.mqtt.client import Client
        from paho.mqtt.enums import CallbackAPIVersion

        client = Client(CallbackAPIVersion.VERSION2, reconnect_on_failure=False)
        client.connect_timeout = _SECONDS
        if self._parts.username is not None:
            client.username_pw_set(*self._login)
        if self._parts.scheme == "mqtts":
            client.tls_set_context(ssl.create_default_context())
        try:
            client.connect(self._host, self._port, keepalive=30)
            client.loop_start()
            published = client.publish(self._topic, message, qos=1)  # waits for the connection
            published.wait_for_publish(_SECONDS)
            if not published.is_published():
                raise NotTakenError("it doesn't confirm a message; look at its log")
        except (OSError, RuntimeError, ValueError) as error:
            raise NotTakenError(_reason(error)) from None
        finally:
            client.disconnect()
            client.loop_stop()


def _reason(error: Exception) -> str:
    """The reason that a row wasn't confirmed, without what may be secret."""
    if isinstance(error, TimeoutError):
        return f"no answer within {_SECONDS:g} s"
    if isinstance(error, http.client.HTTPException):
        return "its answer isn't HTTP"
    return why(error) if isinstance(error, OSError) else "the connection is lost"


_RECEIVER = "INSERT OR IGNORE INTO outboxes SELECT ?, COALESCE (MAX (id), 0), 0 FROM parts"
_UNSENT = """
SELECT id, time, json_set (line, '$.id', id, '$.model', model) FROM parts
WHERE id > (SELECT sent FROM outboxes WHERE sink = ?) ORDER BY id LIMIT 1
"""
_TRIES = 5  # for a row that the receiver refuses
_FIRST_SECONDS, _LONGEST_SECONDS = 0.5, 60.0  # between tries; each pause is twice the last
_LOOK_SECONDS = 5.0  # between checks for unannounced rows
_LAST_SECONDS = 1.0  # for the last rows when the service ends


class Outbox:
    """Sends a record's rows to a receiver, in a thread. Use it in a `with` statement.

    A new receiver gets rows from now on, a known one those that it hasn't confirmed yet.
    """

    def __init__(self, record: Record, sink: Sink) -> None:
        self._record, self._sink = record, sink
        self.name = sink.shown
        self._state = (0, 0)
        self._failed = 0  # tries since the receiver last accepted a row
        self._refused = 0  # tries at which the receiver refused the row itself
        self._news, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"send {self.name}", daemon=True)

    def __enter__(self) -> Outbox:
        with self._record.changing() as db:
            db.execute(_RECEIVER, (self._sink.name,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._news.set()
        self._thread.join(_LAST_SECONDS)

    def wake(self) -> None:
        """Announce new rows."""
        self._news.set()

    def state(self) -> tuple[int, int]:
        """Number of rows that wait to be sent, and of rows refused for good."""
        waiting = "MAX (0, (SELECT COALESCE (MAX (id), 0) FROM parts) - sent)"
        query = f"SELECT {waiting}, refused FROM outboxes WHERE sink = ?"
        with suppress(AnomalyError):  # health says why; the figures stay
            (self._state,) = self._record.read(query, (self._sink.name,))
        return self._state

    def _work(self) -> None:
        """Send rows until the service ends; a thread's work."""
        while True:
            try:
                pause = self._send_next()
            except Exception as error:  # the record is in trouble or closed, or an error of ours
                # The text of an unknown error may hold secrets.
                reason = str(error) if isinstance(error, AnomalyError) else type(error).__name__
                if not self._closing.is_set():
                    log.error("sending to %s failed: %s", self.name, reason)
                pause = _LOOK_SECONDS
            if pause and self._closing.is_set():
                return
            if pause:  # which new rows end, but not after a failure
                (self._closing if self._failed else self._news).wait(pause)
                self._news.clear()

    def _send_next(self) -> float:
        """Send one row.

        Returns:
            Seconds to wait before the next row or try; 0 once a row is sent or skipped.
        """
        unsent = self._record.read(_UNSENT, (self._sink.name,))
        if not unsent:
            return _LOOK_SECONDS
        number, time, message = unsent[0]
        try:
            self._sink.send(message.encode(), f"{number}@{time}")
        except NotTakenError as error:
            self._failed += 1
            self._refused += error.for_good
            if self._refused < _TRIES:
                if self._failed == 1:
                    log.warning("%s doesn't accept parts: %s; trying again", self.name, error)
                return min(_FIRST_SECONDS * 2.0 ** min(self._failed - 1, 20), _LONGEST_SECONDS)
            log.error("%s refused part %d: %s; the part is skipped", self.name, number, error)
            self._done(number, refused=True)
        else:
            if self._failed:
                log.warning("%s accepts parts again", self.name)
            self._done(number)
        self._failed = self._refused = 0
        return 0.0

    def _done(self, number: int, *, refused: bool = False) -> None:
        change = "UPDATE outboxes SET sent = MAX (sent, ?), refused = refused + ? WHERE sink = ?"
        with self._record.changing() as db:
            db.execute(change, (number, refused, self._sink.name))
