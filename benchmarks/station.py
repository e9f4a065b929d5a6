"""What a station adds to the engine's time for a part, from the PLC's signal to its verdict.

    python -m benchmarks.station --model RUN --images FOLDER

A PLC, a process of its own, counts a part every PERIOD seconds, and notes when it has done so and
when the verdict was written. Of that time the engine's is taken off, which is from when it was
given the picture until its answer was on record. What is left is reading the counter, two rows of
the part in the record, reading the picture's file, and writing the verdict.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from pymodbus.server import ModbusTcpServer
from pymodbus.simulator import DataType, SimData, SimDevice

from anomaly.station.commands import running
from anomaly.station.settings import StationSettings
from benchmarks.inputs import machine


async def count(port: int, parts: int, period: float, line: Connection) -> None:
    """The PLC; at the end it sends when each part came, and when its verdict did."""
    came: dict[int, float] = {}
    told: dict[int, float] = {}
    ready = asyncio.Event()

    async def seen(function: int, _: int, address: int, __: int, ___: Any, values: Any) -> None:
        if function == 16 and address == 0:
            told.setdefault((values[1] << 16) + values[2], time.monotonic())
        if function == 16 and address == 3 and values[1]:
            ready.set()

    zeros = [SimData(0, values=[0] * 16, datatype=DataType.REGISTERS)]
    bits = [SimData(0, values=[False] * 16, datatype=DataType.BITS)]
    server = ModbusTcpServer(
        SimDevice(1, (bits, bits, zeros, zeros), action=seen), address=("127.0.0.1", port)
    )
    await server.serve_forever(background=True)
    line.send("up")
    await ready.wait()
    await asyncio.sleep(1)
    for number in range(1, parts + 1):
        await server.async_setValues(1, 16, 10, [number])
        came[number] = time.monotonic()
        await asyncio.sleep(period)
    await asyncio.sleep(2)
    line.send((came, told))


def plc(*arguments: Any) -> None:
    asyncio.run(count(*arguments))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--parts", type=int, default=500)
    parser.add_argument("--period", type=float, default=0.4)
    parser.add_argument("--port", type=int, default=5020)
    options = parser.parse_args()
    options.device, options.threads = "cpu", None
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    arguments = (options.port, options.parts, options.period, theirs)
    process = multiprocessing.get_context("spawn").Process(target=plc, args=arguments)
    process.start()
    ours.recv()
    engine: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        settings = StationSettings.model_validate(
            {
                "model": options.model,
                "cameras": {"top": {"source": str(options.images)}},
                "trigger": {"counter": 10},
                "plc": {"address": f"127.0.0.1:{options.port}"},
                "part_seconds": 60,
                "record": Path(folder) / "line.sqlite",
            }
        )
        with running(settings, options) as station:
            (slot,) = station._slots.values()
            submit = slot.submit

            def timed(data: bytes, name: str, wanted: Any) -> Future[Any]:
                begun, number = time.monotonic(), int(name.partition("/")[0])
                done = submit(data, name, wanted)
                done.add_done_callback(lambda _: engine.update({number: time.monotonic() - begun}))
                return done

            slot.submit = timed
            came, told = ours.recv()
    process.join()
    whole = np.array([told[number] - came[number] for number in came])
    alone = np.array([engine[number] for number in came])
    print(f"{machine()}; {len(came)} parts, one every {options.period:g} s")
    for name, seconds in (("whole", whole), ("engine", alone), ("overhead", whole - alone)):
        values = " ".join(f"{v:6.1f}" for v in np.percentile(1000 * seconds, (50, 90, 99, 100)))
        print(f"{name:<9} median, p90, p99, highest: {values} ms")


if __name__ == "__main__":
    main()
