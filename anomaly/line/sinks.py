"""Receivers of results: a webhook, or a topic of an MQTT broker.

Only the configured address is contacted; redirects and the environment's proxies are ignored.
Messages and logs name scheme, host and port, no more: the rest of an address
may be secret.
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
from contextlib import closing, suppress
from typing import TypeAlias
from urllib.parse import SplitResult, unquote, urlsplit

from anomaly.errors import AnomalyError, why
from anomaly.line.record import Record
from anomaly.runtime import __version__

log = logging.getLogger(__name__)

_SECONDS = 5.0  # for a row and its answer; MQTT: for each step
_ABOUT_THE_ROW = (400, 413, 422)  # statuses with which a webhook refuses a row for good
_DEFAULT_PORTS = {"http": 80, "https": 443, "mqtt": 1883, "mqtts": 8883}


class NotTakenError(AnomalyError):
    """A receiver hasn't accepted a row.

    Args:
        message: why.
        for_good: whether it will never accept this row.
    """

    def __init__(self, message: str, *, for_good: bool = False) -> None:
        super().__init__(message)
        self.for_good = for_good


class Webhook:
    """A POST request for each row, which any 2xx status confirms.

    Args:
        url: `http://` or `https://`; a user and a password in it are sent as basic authentication.

    Raises:
        AnomalyError: the address is invalid.

    Attributes:
        shown: its name in messages.
        name: identifies it from one start of the service to the next; holds no password.
    """

    def __init__(self, url: str) -> None:
        parts, port = _split(url, "--webhook", ("http", "https"))
        self.shown, self.name = _names(parts, port)
        self._where = parts.scheme, str(parts.hostname), port
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        self._headers["User-Agent"] = f"anomaly/{__version__}"
        if login := _login(parts):
            basic = base64.b64encode(":".join(login).encode()).decode()
            self._headers["Authorization"] = f"Basic {basic}"

    def send(self, message: bytes, key: str) -> None:
        """Deliver a row, on a connection of its own.

        Args:
            message: as JSON.
            key: identifies this row whenever it is sent.

        Raises:
            NotTakenError: the receiver hasn't confirmed the row.
        """
        scheme, host, port = self._where
        kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
        connection, late = kind(host, port, timeout=_SECONDS), threading.Event()

        def end() -> None:
            late.set()
            with suppress(OSError, AttributeError):  # AttributeError: it isn't open
                connection.sock.shutdown(socket.SHUT_RDWR)

        # For all of it: whoever answers byte by byte would hold up the rows behind.
        limit = threading.Timer(_SECONDS, end)
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


class Mqtt:
    """MQTT 3.1.1: a message with QoS 1 for each row, which the broker confirms.

    Args:
        url: `mqtt://` or, with TLS, `mqtts://`, host, port and topic, perhaps user and password.

    Raises:
        AnomalyError: the address is invalid, or paho-mqtt isn't installed.
    """

    def __init__(self, url: str) -> None:
        parts, port = _split(url, "--mqtt", ("mqtt", "mqtts"))
        self._topic = unquote(parts.path.lstrip("/"))
        if not self._topic or parts.query or set("+#\0") & set(self._topic):
            raise AnomalyError(
                "--mqtt needs a topic without + and # after the host: mqtt://HOST/factory/line-1"
            )
        if importlib.util.find_spec("paho") is None:
            raise AnomalyError("--mqtt needs paho-mqtt: pip install 'anomaly[mqtt]'")
        self.shown, self.name = _names(parts, port)
        self._parts, self._port = parts, port

    def send(self, message: bytes, key: str) -> None:
        """Deliver a row, on a connection of its own; see `Webhook.send`."""
        from paho.mqtt.client import Client
        from paho.mqtt.enums import CallbackAPIVersion

        client = Client(CallbackAPIVersion.VERSION2, reconnect_on_failure=False)
        client.connect_timeout = _SECONDS
        if login := _login(self._parts):
            client.username_pw_set(*login)
        if self._parts.scheme == "mqtts":
            client.tls_set_context(ssl.create_default_context())
        try:
            client.connect(str(self._parts.hostname), self._port, keepalive=30)
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


Sink: TypeAlias = Webhook | Mqtt


def _split(url: str, option: str, schemes: tuple[str, ...]) -> tuple[SplitResult, int]:
    try:
        parts = urlsplit(url)
        port = parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)
        (parts.hostname or "").encode("idna")  # as looking it up will
    except ValueError:  # UnicodeError is one
        parts, port = urlsplit(""), 0
    plain = url.isascii() and url.isprintable() and " " not in url
    if parts.scheme not in schemes or not parts.hostname or not plain:
        raise AnomalyError(
            f"{option} takes an address that begins with {' or '.join(f'{s}://' for s in schemes)}"
            " and a valid host, without spaces"
        )
    return parts, port


def _login(parts: SplitResult) -> tuple[str, str] | None:
    """User and password of an address."""
    if parts.username is None:
        return None
    return unquote(parts.username), unquote(parts.password or "")


def _names(parts: SplitResult, port: int) -> tuple[str, str]:
    """A receiver's name in messages, and its identifying name."""
    host = f"[{parts.hostname}]" if ":" in str(parts.hostname) else parts.hostname
    shown = f"{parts.scheme}://{host}:{port}"
    where = parts.path or "/"  # a query may hold a key, which may change
    return shown, f"{shown} {hashlib.sha256(where.encode()).hexdigest()[:8]}"


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {_SECONDS:g} s"
    if isinstance(error, http.client.HTTPException):
        return "its answer isn't HTTP"
    return why(error) if isinstance(error, OSError) else "the connection is lost"


# A new receiver gets only rows from now on.
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
    """Sends rows to a receiver in a thread. Use it in a `with` statement.

    Args:
        record: of the rows; sends those from now on, or from where the last process has stopped.
        sink: the receiver.

    Attributes:
        name: the receiver's, in messages.
    """

    def __init__(self, record: Record, sink: Sink) -> None:
        self._record, self._sink = record, sink
        self.name = sink.shown
        self._state = (0, 0)
        self._failed = 0  # tries since the receiver last accepted a row
        self._refused = 0  # tries at which it refused the row itself
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
        """Number of rows waiting to be sent, and of rows refused for good."""
        waiting = "MAX (0, (SELECT COALESCE (MAX (id), 0) FROM parts) - sent)"
        query = f"SELECT {waiting}, refused FROM outboxes WHERE sink = ?"
        with suppress(AnomalyError):  # health says why; the figures stay
            (self._state,) = self._record.read(query, (self._sink.name,))
        return self._state

    def _work(self) -> None:
        while True:
            try:
                pause = self._send_next()
            except Exception as error:  # the record is in trouble, or closed; or a mistake in here
                known = isinstance(error, AnomalyError)  # the text of others may hold secrets
                reason = str(error) if known else type(error).__name__
                if not self._closing.is_set():
                    log.error("sending to %s failed: %s", self.name, reason)
                pause = _LOOK_SECONDS
            if pause and self._closing.is_set():
                return
            if pause:
                (self._closing if self._failed else self._news).wait(pause)
                self._news.clear()

    def _send_next(self) -> float:
        """Send one row.

        Returns:
            Seconds to wait before the next one.
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
