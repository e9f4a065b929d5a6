"""The HTTP server of the service."""

from __future__ import annotations

import asyncio
import math
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from anomaly.errors import AnomalyError
from anomaly.line.app import make_app
from anomaly.line.guard import Guard
from anomaly.line.service import InspectionService

MOST_KNOWN = 512  # connections of clients with a request that was admitted
MOST_STRANGERS = 256
MOST_OF_ADDRESS = 128
_AT_A_TIME = 4  # connections that work
_IDLE_SECONDS = 15  # that a connection may stay without a complete head of a request
_TAKE_SECONDS = 30  # that a client may take to receive written bytes
_LAST_SECONDS = 3  # after a stop, until parts that wait are refused; then for the last answers
_HEAD_BYTES = 8192
_HEAD_LINES = 100
# Chunks of a body: so many, and one more for each so many bytes.
_CHUNKS, _CHUNK_BYTES = 64, 256
_LINES_BYTES = 1024  # of heads, chunks and trailers, parsed at once
_WAITING = 1024  # connections that the system queues
# Taken at once: a new connection has sent its request before as many others have come as there
# are places.
_AT_ONCE = 32
_BLANK_LINE = re.compile(rb"\n\r?\n")
_EVENTS = 32  # of a connection, before others have their turn


def listening(host: str, port: int) -> socket.socket:
    """A listening socket for the service; port 0 takes any free port.

    Raises:
        AnomalyError: the address can't be listened at.
    """
    try:
        kind = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(kind[0])
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(kind[4])
    except (OSError, UnicodeError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or "the address is invalid"
        raise AnomalyError(
            f"can't listen at {host}, port {port} ({reason}); give another --host or --port"
        ) from None
    return listener


def serve(
    service: InspectionService,
    listener: socket.socket,
    token: str,
    stopped: Callable[[], bool],
) -> None:
    """Answer requests until stopped; all accepted parts are answered, see `_Server`.

    Args:
        service: open.
        listener: as `listening` gives it.
        token: that each request has to send; empty for none. See `Guard`.
        stopped: whether to stop; called ten times a second.
    """
    guard = Guard(
        make_app(service),
        token,
        service.limits,
        lambda status: service.metrics.answers.labels(str(status)).inc(),
    )
    config = uvicorn.Config(
        guard,
        http=cast(Any, partial(_Connection, Places(), Turns())),
        log_config=None,
        log_level="error",  # a warning for each bad request would let anybody fill the log
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        backlog=_AT_ONCE,
        h11_max_incomplete_event_size=_HEAD_BYTES,
        timeout_keep_alive=_IDLE_SECONDS,
    )
    server = _Server(config, service, stopped)
    asyncio.run(server.serve([listener]))


class _Paced(h11.Connection):
    """Parses a client's bytes, a few events at a time.

    A request's head ends a turn, so that its body isn't parsed before the head was checked.

    Attributes:
        turn: events left in this turn.
        refused: why parsing has stopped; empty otherwise, and for bytes that aren't HTTP.
    """

    turn = 0
    refused = ""
    _more_chunks = math.inf
    _body_bytes_left = 0  # bytes of the body, where the head says how many

    def __init__(self) -> None:
        super().__init__(h11.SERVER, _HEAD_BYTES)
        self._unparsed = bytearray()  # received, but not passed to h11

    def receive_data(self, data: bytes) -> None:
        """Add received bytes."""
        self._unparsed += data

    def next_event(self) -> Any:
        """The next event; NEED_DATA also when the turn is over.

        Raises:
            h11.RemoteProtocolError: the bytes aren't HTTP, or have a head or trailers that are
                too long, or comes in chunks of a few bytes, each of which takes as long as one of
                many.
        """
        if self.turn == 0:
            return h11.NEED_DATA
        while (event := self._parsed()) is h11.NEED_DATA and self._unparsed:
            size = max(self._body_bytes_left, _LINES_BYTES)
            super().receive_data(bytes(self._unparsed[:size]))
            del self._unparsed[:size]
        self.turn -= 1
        if isinstance(event, h11.Request):
            self.turn = 0
            headers = dict(event.headers)
            self._body_bytes_left = int(headers.get(b"content-length", 0))
            self._more_chunks = _CHUNKS if b"transfer-encoding" in headers else math.inf
        elif isinstance(event, h11.Data):
            self._body_bytes_left -= len(event.data)
            self._more_chunks += len(event.data) / _CHUNK_BYTES - event.chunk_start
            if self._more_chunks < 0:
                raise self._refusal("the chunks of the body are too small; send larger ones")
        return event

    def _parsed(self) -> Any:
        """h11's next event; lines are counted before, since each takes time."""
        lines = self.trailing_data[0]
        if self.their_state is h11.IDLE:
            blank = _BLANK_LINE.search(lines)
            size = blank.start() if blank else len(lines)
            if size > _HEAD_BYTES or lines.count(b"\n", 0, size) > _HEAD_LINES:
                raise self._refusal(
                    f"the head of a request has {_HEAD_BYTES} bytes and {_HEAD_LINES} lines at most"
                )
        elif self._more_chunks < math.inf and len(lines) > 2 * _LINES_BYTES:  # no whole line yet
            raise self._refusal("the trailers of the body are too long; leave them out")
        return super().next_event()

    def _refusal(self, reason: str) -> h11.RemoteProtocolError:
        self.refused = reason
        return h11.RemoteProtocolError(reason)


class Places:
    """Limits the number of connections.

    A connection is a stranger until one of its requests was admitted, with the token if one is
    set. Strangers have few places, and the oldest is closed for the next, so they can't keep out
    clients with the token. A proper client sends its request at once, so it is a stranger only
    briefly.
    """

    def __init__(self) -> None:
        self._strangers: dict[_Connection, None] = {}  # the oldest is first
        self._of_address: dict[str, dict[_Connection, None]] = {}
        self._known: dict[_Connection, None] = {}  # the one with the latest request is last

    def come(self, connection: _Connection) -> None:
        """Add a connection."""
        self._strangers[connection] = None
        of_address = self._of_address.setdefault(connection.address, {})
        of_address[connection] = None
        if len(of_address) > MOST_OF_ADDRESS:
            self._end(next(iter(of_address)))
        elif len(self._strangers) > MOST_STRANGERS:
            self._end(next(iter(self._strangers)))

    def let_in(self, connection: _Connection) -> bool:
        """Admit a connection's request; False if all places are taken.

        An idle connection is closed to make room.
        """
        self._known.pop(connection, None)
        if len(self._known) >= MOST_KNOWN:
            idle = next((one for one in self._known if one.idle), None)
            if idle is None:
                return False
            self._end(idle)
        self._forget_stranger(connection)
        self._known[connection] = None
        return True

    def leave(self, connection: _Connection) -> None:
        """Remove a closed connection."""
        self._known.pop(connection, None)
        self._forget_stranger(connection)

    def _end(self, connection: _Connection) -> None:
        self.leave(connection)
        connection.transport.abort()

    def _forget_stranger(self, connection: _Connection) -> None:
        self._strangers.pop(connection, None)
        of_address = self._of_address.get(connection.address, {})
        of_address.pop(connection, None)
        if not of_address:
            self._of_address.pop(connection.address, None)


class Turns:
    """Lets a few connections work at a time, so that a new one needn't wait for all."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], object]] = deque()
        self._runs = False

    def ask(self, go_on: Callable[[], object]) -> None:
        """Call a function when its turn comes."""
        self._waiting.append(go_on)
        if not self._runs:
            self._next()

    async def come(self) -> None:
        """Wait for a turn."""
        turn = asyncio.Event()
        self.ask(turn.set)
        await turn.wait()

    def _next(self) -> None:
        # It ends only when nobody waits: who asks in this iteration of the loop has the next turn.
        self._runs = bool(self._waiting)
        loop = asyncio.get_running_loop()
        for _ in range(min(_AT_A_TIME, len(self._waiting))):
            loop.call_soon(self._waiting.popleft())
        if self._runs:
            loop.call_soon(self._next)


class _Connection(H11Protocol):
    """One client's connection.

    Attributes:
        address: of the client.
        turns: shared by all connections.
        waiting: since when no request is in progress; None during a request.
        unread: since when written bytes wait to be received; None if none do.
    """

    def __init__(self, places: Places, turns: Turns, **options: Any) -> None:
        super().__init__(**options)
        self.conn = self._paced = _Paced()
        self.app_state = {"connection": self}
        self.address = ""
        self.waiting: float | None = None
        self.unread: float | None = None
        self._answered: object = None
        self.turns = turns
        self._places = places
        self._turn_requested = False

    @property
    def idle(self) -> bool:
        """Whether no request is in progress."""
        return self.cycle is None or self.cycle.response_complete

    def let_in(self) -> bool:
        """Take a place for a request; False if none is free."""
        return self._places.let_in(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start a new connection."""
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._places.come(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Clean up after the connection has closed."""
        self._places.leave(self)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that aren't HTTP."""
        try:
            super().send_400_response(self._paced.refused or msg)
        except h11.LocalProtocolError:  # an answer is in progress
            self.transport.abort()

    def handle_events(self) -> None:
        """Handle received bytes for one turn; other connections have theirs before the next."""
        if self._turn_requested:
            return
        self._paced.turn = _EVENTS
        super().handle_events()
        if self._paced.turn == 0:
            self._turn_requested = True
            self.transport.pause_reading()
            self.turns.ask(self._go_on)

    def _go_on(self) -> None:
        self._turn_requested = False
        if self.transport.is_closing():
            return
        if not self.flow.read_paused:
            self.transport.resume_reading()
        self.handle_events()

    def end_if_late(self, now: float) -> None:
        """Close the connection if the client was too slow."""
        if self.transport.get_write_buffer_size() == 0:
            self.unread = None
        elif self.unread is None:
            self.unread = now
        elif now - self.unread > _TAKE_SECONDS:
            self.transport.abort()
        if not self.idle:
            self.waiting = None
        elif self.waiting is None or self._answered is not self.cycle:
            self.waiting, self._answered = now, self.cycle
        elif now - self.waiting > _IDLE_SECONDS:
            self.transport.close()


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to the command and ends when all parts are answered.

    Once stopped, it refuses new parts, and after some seconds those that wait; parts that were
    begun are finished, whatever time they take. It closes connections whose client doesn't
    complete a request or doesn't receive the answer; uvicorn would wait for both forever.
    """

    def __init__(
        self, config: uvicorn.Config, service: InspectionService, stopped: Callable[[], bool]
    ) -> None:
        super().__init__(config)
        self._service = service
        self._stopped = stopped
        self._stopped_at = self._worked_at = 0.0

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing: the command has its own handlers."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(_WAITING)  # asyncio lets as many wait as it takes at once

    async def on_tick(self, counter: int) -> bool:
        """True once the server has to end; asked ten times a second."""
        now = time.monotonic()
        if counter % 10 == 0:
            for connection in self._connections():
                connection.end_if_late(now)
        if self._stopped() and self._has_answered(now):
            return True
        return await super().on_tick(counter)

    def _has_answered(self, now: float) -> bool:
        """True if all parts are answered, after a stop."""
        if not self._service.stopping:
            self._service.stop()
            self._stopped_at = self._worked_at = now
        if self._service.waiting:
            self._worked_at = now
            if now - self._stopped_at > _LAST_SECONDS:
                self._service.refuse_waiting()
            return False
        late = now - self._worked_at > _LAST_SECONDS
        return late or all(connection.idle for connection in self._connections())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close all connections."""
        for connection in self._connections():
            if not connection.idle:
                connection.transport.abort()
        await super().shutdown(sockets)

    def _connections(self) -> list[_Connection]:
        return cast(list[_Connection], list(self.server_state.connections))
