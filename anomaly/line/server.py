"""The service behind an HTTP server, until it is to stop."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from anomaly.errors import AnomalyError
from anomaly.line.app import make_app
from anomaly.line.bodies import Guard
from anomaly.line.service import InspectionService

_IDLE_SECONDS = 15  # that a connection is kept without a request, or with the head of one
_LAST_SECONDS = 6  # that requests have to be finished once the service is to stop
_MOST_CONNECTIONS = 512


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
    config = uvicorn.Config(
        Guard(make_app(service), token),
        http="h11",
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=_LAST_SECONDS,
        limit_concurrency=_MOST_CONNECTIONS,
    )
    server = _Server(config, service, stopped)
    asyncio.run(server.serve([listener]))


class _Server(uvicorn.Server):
    """Leaves signals to the command, and ends what follows along first.

    Connections whose client doesn't come to the end of a request's head are closed: uvicorn waits
    for them forever, and `_MOST_CONNECTIONS` of them would keep everybody else out.
    """

    def __init__(
        self, config: uvicorn.Config, service: InspectionService, stopped: Callable[[], bool]
    ) -> None:
        super().__init__(config)
        self._service = service
        self._stopped = stopped
        self._silent: dict[Any, tuple[object, float]] = {}

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing: the command has its own handlers."""
        yield

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop; asked ten times a second."""
        if self._stopped():
            self._service.stop()
            return True
        if counter % 10 == 0:
            self._close_silent()
        return await super().on_tick(counter)

    def _close_silent(self) -> None:
        now, silent = time.monotonic(), {}
        for connection in list(self.server_state.connections):
            last = getattr(connection, "cycle", None)  # request and answer
            if last is not None and not last.response_complete:
                continue
            before, since = self._silent.get(connection, (None, now))
            since = since if before is last else now
            silent[connection] = (last, since)
            if now - since > _IDLE_SECONDS:
                connection.transport.close()
        self._silent = silent
