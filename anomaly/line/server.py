"""The service behind an HTTP server, until it is to stop."""

from __future__ import annotations

import asyncio
import socket
import time
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
from anomaly.line.places import Places
from anomaly.line.service import InspectionService

_IDLE_SECONDS = 15  # that a connection is kept without a request, or with the head of one
_TAKE_SECONDS = 30  # that a client may take to receive what was written to it
_LAST_SECONDS = 6  # that requests have to be finished once the service is to stop
_HEAD_BYTES = 8192
_WAITING = 1024  # connections that the system keeps until they are taken
# Taken at once: a new connection has sent its request before as many others have come as there
# are places.
_AT_ONCE = 8
_EVENTS = 32  # of a connection, before others have their turn


def listening(host: str, port: int) -> socket.socket:
    """A socket that the service will listen at; port 0 takes any that is free.

    Raises:
        AnomalyError: the address can't be listened at.
    """
    try:
        kind = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(kind[0])
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(kind[4])
    except (OSError, UnicodeError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or "it makes no sense"
        raise AnomalyError(
            f"nothing can listen at {host}, port {port} ({reason}); give another --host or --port"
        ) from None
    return listener


def serve(
    service: InspectionService, listener: socket.socket, token: str, stopped: Callable[[], bool]
) -> None:
    """Answer requests until it is to stop; what was taken is answered.

    Args:
        service: open.
        listener: as `listening` gives it.
        token: that requests have to show; empty for none.
        stopped: asked ten times a second.
    """
    guard = Guard(
        make_app(service),
        token,
        service.limits,
        lambda status: service.metrics.answers.labels(str(status)).inc(),
    )
    config = uvicorn.Config(
        guard,
        http=cast(Any, partial(_Connection, Places())),
        log_config=None,
        log_level="error",  # a warning for each bad request would let anybody fill the log
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        backlog=_AT_ONCE,
        h11_max_incomplete_event_size=_HEAD_BYTES,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=_LAST_SECONDS,
    )
    server = _Server(config, service, stopped)
    asyncio.run(server.serve([listener]))


class _Paced(h11.Connection):
    """Parses what a client has sent a few events at a time.

    A request's head ends a turn, so that nothing of its body is parsed before it was looked at.
    """

    turn = 0

    def next_event(self) -> Any:
        """The next event; NEED_DATA, too, once the turn is over."""
        if self.turn == 0:
            return h11.NEED_DATA
        event = super().next_event()
        self.turn = 0 if isinstance(event, h11.Request) else self.turn - 1
        return event


class _Connection(H11Protocol):
    """One client's connection.

    Attributes:
        address: of the client.
        waiting: since when it is without a request that is under way; None where one is.
        unread: since when something that was written isn't received; None where nothing is left.
    """

    def __init__(self, places: Places, **told: Any) -> None:
        super().__init__(**told)
        self.conn = self._paced = _Paced(h11.SERVER, _HEAD_BYTES)
        self.app_state = {"connection": self}
        self.address = ""
        self.waiting: float | None = None
        self.unread: float | None = None
        self._answered: object = None
        self._places = places
        self._due = False

    @property
    def idle(self) -> bool:
        """Whether no request is under way."""
        return self.cycle is None or self.cycle.response_complete

    def let_in(self) -> bool:
        """Give it a place for a request; False where there is none."""
        return self._places.let_in(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """It is there."""
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._places.come(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        self._places.leave(self)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Handle what has come, for one turn; others have theirs before the next."""
        if self._due:
            return
        self._paced.turn = _EVENTS
        super().handle_events()
        if self._paced.turn == 0:
            self._due = True
            self.transport.pause_reading()
            self.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._due = False
        if self.transport.is_closing():
            return
        if not self.flow.read_paused:
            self.transport.resume_reading()
        self.handle_events()

    def end_if_late(self, now: float) -> None:
        """End it where the client has let the time pass."""
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
    """Leaves signals to the command, and ends what follows along first.

    Connections are ended whose client doesn't come to the end of a request's head, or doesn't
    receive what was answered: uvicorn waits for both forever.
    """

    def __init__(
        self, config: uvicorn.Config, service: InspectionService, stopped: Callable[[], bool]
    ) -> None:
        super().__init__(config)
        self._service = service
        self._stopped = stopped

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
        """Whether to stop; asked ten times a second."""
        if self._stopped():
            self._service.stop()
            return True
        if counter % 10 == 0:
            now = time.monotonic()
            for connection in list(self.server_state.connections):
                cast(_Connection, connection).end_if_late(now)
        return await super().on_tick(counter)
