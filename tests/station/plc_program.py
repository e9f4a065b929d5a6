"""A PLC as a process: a pymodbus server, and a program that sees parts come and counts verdicts.

    python plc_program.py PORT LOG PERIOD

It adds a line to the log for each part (`part COUNT`), each write of a verdict (`verdict NUMBER
CODE`) and each state of `ready` (`ready 0`). Started again, it goes on counting from its log. A
part comes every PERIOD seconds from when the station is ready first, until there is a file `end`
beside the log; it is counted in register 10 and sets coil 0.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from pymodbus.server import ModbusTcpServer
from pymodbus.simulator import DataType, SimData, SimDevice

VERDICT, STATUS, COUNTER, COIL = 0, 3, 10, 0


async def main(port: int, log: Path, period: float) -> None:
    handle = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    written = log.read_text().splitlines()
    count = sum(line.startswith("part") for line in written)

    def note(line: str) -> None:
        os.write(handle, f"{line}\n".encode())

    ready = -1

    async def seen(
        function: int, _: int, address: int, __: int, ___: object, values: object
    ) -> None:
        nonlocal ready
        if function == 16 and address == VERDICT:
            code, high, low = values
            note(f"verdict {(high << 16) + low} {code}")
        if function == 16 and address == STATUS and values[1] != ready:
            ready = values[1]
            note(f"ready {ready}")

    zeros = SimData(0, values=[0] * 20, datatype=DataType.REGISTERS)
    bits = SimData(0, values=[False] * 16, datatype=DataType.BITS)
    device = SimDevice(1, ([bits], [bits], [zeros], [zeros]), action=seen)
    server = ModbusTcpServer(device, address=("127.0.0.1", port))
    await server.serve_forever(background=True)
    await server.async_setValues(1, 16, COUNTER, [count % 65536])
    note("up")
    while True:
        await asyncio.sleep(period)
        if (ready == 1 or count) and not log.with_name("end").exists():
            count += 1
            note(f"part {count}")
            await server.async_setValues(1, 16, COUNTER, [count % 65536])
            await server.async_setValues(1, 5, COIL, [True])


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])))
