"""Which connections may stay, which is closed for a new one, and whose turn it is."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

MOST_KNOWN = 512
MOST_STRANGERS = 256
MOST_OF_ADDRESS = 128
_AT_A_TIME = 4


class Connection(Protocol):
    """What `Places` needs of a connection."""

    address: str
    transport: asyncio.Transport

    @property
    def idle(self) -> bool:
        """Whether the connection has no request in progress."""
        ...


class Places:
    """Limits the number of connections.

    A connection is a stranger until one of its requests was admitted, with the token if one is
    set. Strangers have few places, and the oldest is closed for the next, so they can't keep out
    clients with the token. A proper client sends its request at once, so it is a stranger only
    briefly.
    """

    def __init__(self) -> None:
        self._strangers: dict[Connection, None] = {}  # the oldest is first
        self._of_address: dict[str, dict[Connection, None]] = {}
        self._known: dict[Connection, None] = {}  # the one with the latest request is last

    def come(self, connection: Connection) -> None:
        """Add a connection."""
        self._strangers[connection] = None
        of_address = self._of_address.setdefault(connection.address, {})
        of_address[connection] = None
        if len(of_address) > MOST_OF_ADDRESS:
            self._end(next(iter(of_address)))
        elif len(self._strangers) > MOST_STRANGERS:
            self._end(next(iter(self._strangers)))

    def let_in(self, connection: Connection) -> bool:
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

    def leave(self, connection: Connection) -> None:
        """Remove a closed connection."""
        self._known.pop(connection, None)
        self._forget_stranger(connection)

    def _end(self, connection: Connection) -> None:
        self.leave(connection)
        connection.transport.abort()

    def _forget_stranger(self, connection: Connection) -> None:
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
