"""The PLC as a Modbus TCP server: verdicts, heartbeat and ready are written, triggers are read."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pymodbus.client import ModbusTcpClient
from pymodbus.exceptions import ModbusException

from anomaly.errors import AnomalyError
from anomaly.station.settings import PlcSettings, host_and_port

log = logging.getLogger(__name__)

CODES = {"good": 1, "review": 2, "reject": 3}
_SECONDS = 0.5  # longest wait for an answer; time between heartbeats
_FIRST_SECONDS, _LONGEST_SECONDS = (
    0.1,
    5.0,
)  # between tries to connect; each pause is twice the last


class PlcError(AnomalyError):
    """The PLC doesn't answer, or refuses a request."""


class Plc:
    """The connection to the PLC, shared by all threads and reopened after it was lost.

    Args:
        settings: address and registers.
        ready: whether the station accepts parts.
        alive: whether the station works; otherwise its heartbeat stops.
    """

    def __init__(
        self, settings: PlcSettings, ready: Callable[[], bool], alive: Callable[[], bool]
    ) -> None:
        host, port = host_and_port(settings.address, "plc.address")
        logging.getLogger("pymodbus").setLevel(
            logging.CRITICAL
        )  # its messages are replaced by these
        self._client: Any = ModbusTcpClient(host, port=port, timeout=_SECONDS, retries=0)
        self._settings, self._ready, self._alive = settings, ready, alive
        self._lock = threading.Lock()
        self._connected, self._beat = False, 0

    def connect(self) -> None:
        """Connect. Raises PlcError if no PLC answers."""
        with self._lock:
            self._connected = self._client.connect()
        if not self._connected:
            raise PlcError(
                f"no PLC answers at {self._settings.address}; check the address, the network and "
                "whether its Modbus TCP server is on"
            )

    def work(self, closing: threading.Event) -> None:
        """Keep connection and heartbeat up; at the end report that the station isn't ready."""
        pause = _FIRST_SECONDS
        while not closing.is_set():
            try:
                if not self._connected:
                    self.connect()
                    log.warning("the PLC at %s answers again", self._settings.address)
                self._beat = (self._beat + self._alive()) % 65536
                self._write(self._settings.status_register, self._beat, int(self._ready()))
                pause, wait = _FIRST_SECONDS, _SECONDS
            except PlcError:
                pause, wait = min(2 * pause, _LONGEST_SECONDS), pause
            closing.wait(wait)

    def close(self) -> None:
        """Report that the station isn't ready, and disconnect."""
        with suppress(PlcError):
            self._write(self._settings.status_register, self._beat, 0)
        self._client.close()

    def counter(self, register: int) -> int:
        """The value of a register."""
        return int(self._ask("read_holding_registers", register).registers[0])

    def take(self, coil: int) -> bool:
        """Whether a coil was set; clears it."""
        is_set = bool(self._ask("read_coils", coil).bits[0])
        if is_set:
            self._ask("write_coil", coil, False)
        return is_set

    def last(self) -> tuple[int, int]:
        """Verdict code and number of the part that was written last."""
        place = self._settings.verdict_register
        code, high, low = self._ask("read_holding_registers", place, count=3).registers
        return code, (high << 16) + low

    def say(self, code: int, number: int, until: float) -> str:
        """Write a part's verdict code; repeats until it is confirmed or too late.

        Returns:
            Empty if the PLC has confirmed it, otherwise the reason.
        """
        tried = False
        while True:
            try:
                if not tried or self.last() != (code, number):
                    tried = tried or self._connected
                    place = self._settings.verdict_register
                    self._write(place, code, number >> 16 & 0xFFFF, number & 0xFFFF)
                return ""
            except PlcError as error:
                if time.perf_counter() > until:
                    return f"{error}{'; it may have the verdict' if tried else ''}"
            time.sleep(0.01)

    def _write(self, register: int, *values: int) -> None:
        self._ask("write_registers", register, list(values))

    def _ask(self, name: str, address: int, *values: Any, **more: Any) -> Any:
        """Send one request. Raises PlcError if it isn't answered or is refused."""
        with self._lock:
            if not self._connected:
                raise PlcError(f"the PLC at {self._settings.address} isn't connected")
            try:
                request = getattr(self._client, name)
                answer = request(address, *values, device_id=self._settings.unit, **more)
            except (ModbusException, OSError) as error:
                self._connected = False
                self._client.close()
                log.error("the PLC at %s doesn't answer; trying again", self._settings.address)
                raise PlcError(f"the PLC doesn't answer: {error}") from None
        if answer.isError():
            raise PlcError(f"the PLC refuses address {address} ({name}); check unit and registers")
        return answer
