"""Which connections may stay, which leaves when another comes, and whose turn it is."""

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
    """What is asked of a connection."""

    address: str
    transport: asyncio.Transport

    @property
    def idle(self) -> bool:
        """Whether no request of it is under way."""
        ...


class Places:
    """The places for connections.

    A connection is a stranger until a request of it was let in, with the token where one is set.
    Who only connects can't keep out those who have the token: strangers have few places, and
    the one that has come first leaves for the next. A client that is meant to be here sends its
    request along, so it stays a stranger for a moment only.
    """

    def __init__(self) -> None:
        self._strangers: dict[Connection, None] = {}  # the one that has come first is first
        self._of_address: dict[str, dict[Connection, None]] = {}
        self._known: dict[Connection, None] = {}  # the one that has asked last is last

    def come(self, connection: Connection) -> None:
        """A connection is there."""
        self._strangers[connection] = None
        of_address = self._of_address.setdefault(connection.address, {})
        of_address[connection] = None
        if len(of_address) > MOST_OF_ADDRESS:
            self._end(next(iter(of_address)))
        elif len(self._strangers) > MOST_STRANGERS:
            self._end(next(iter(self._strangers)))

    def let_in(self, connection: Connection) -> bool:
        """A request of it may be answered; False where all places are taken.

        Connections without a request under way leave for it.
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
        """A connection has ended."""
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
    """Lets a few go on at a time, so that who comes meanwhile needn't wait for all of them."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], object]] = deque()
        self._runs = False

    def ask(self, go_on: Callable[[], object]) -> None:
        """Have something called once it is its turn."""
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
