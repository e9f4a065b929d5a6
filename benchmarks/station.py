"""What a station adds to the engine's time for a part, and whether `benchmark` foretells that time.

    python -m benchmarks.station --model RUN --images FOLDER

A PLC, a process of its own, counts the next part once it has the verdict of the last one, and notes
both times. Of that time the engine's is taken off, which is from when it was given the picture
until its answer was on record. What is left is reading the counter, two rows of the part in the
record, reading the picture's file, and writing the verdict. In turns with it, `anomaly benchmark`
measures the same model and images.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from pymodbus.server import ModbusTcpServer
from pymodbus.simulator import DataType, SimData, SimDevice

from anomaly.cli import _set_environment
from anomaly.station.commands import running
from anomaly.station.settings import StationSettings


async def count(port: int, parts: int, line: Connection) -> None:
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
        while number not in told:
            await asyncio.sleep(0.005)
    line.send((came, told))


def plc(*arguments: Any) -> None:
    asyncio.run(count(*arguments))


def station(options: argparse.Namespace, folder: Path) -> tuple[list[float], list[float]]:
    """Seconds of each part, and of them the engine's."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    arguments = (options.port, options.parts, theirs)
    process = multiprocessing.get_context("spawn").Process(target=plc, args=arguments)
    process.start()
    ours.recv()
    engine: dict[int, float] = {}
    settings = StationSettings.model_validate(
        {
            "model": options.model,
            "cameras": {"top": {"source": str(options.images)}},
            "trigger": {"counter": 10},
            "plc": {"address": f"127.0.0.1:{options.port}"},
            "part_seconds": 60,
            "record": folder / "line.sqlite",
        }
    )
    with running(settings, options) as line:
        (slot,) = line._slots.values()
        submit = slot.submit

        def timed(data: bytes, name: str, wanted: Any) -> Future[Any]:
            begun, number = time.monotonic(), int(name.partition("/")[0])
            done = submit(data, name, wanted)
            done.add_done_callback(lambda _: engine.update({number: time.monotonic() - begun}))
            return done

        slot.submit = timed
        came, told = ours.recv()
    process.join()
    return [told[number] - came[number] for number in came], [engine[number] for number in came]


def foretold(options: argparse.Namespace) -> float:
    """What `benchmark` says of half of the parts, in milliseconds; in a process of its own."""
    command = [sys.executable, "-m", "anomaly", "benchmark", "--json", "--device", "cpu"]
    images = ["--model", str(options.model), "--images", str(options.images)]
    (figures,) = json.loads(subprocess.check_output([*command, *images]))
    return float(figures["milliseconds"]["whole part"][0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--parts", type=int, default=100, help="of each turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--port", type=int, default=5020)
    options = parser.parse_args()
    options.device, options.threads = "cpu", None
    _set_environment()  # as for the command, before torch is imported
    from benchmarks.inputs import machine

    print(f"{machine()}; {options.turns} turns of {options.parts} parts")
    whole, engine, ratios = list[float](), list[float](), list[float]()
    for _ in range(options.turns):
        with tempfile.TemporaryDirectory() as folder:
            took = station(options, Path(folder))
        whole, engine = whole + took[0], engine + took[1]
        ours, said = 1000 * median(took[1]), foretold(options)
        ratios.append(ours / said)
        print(f"median of the engine {ours:.1f} ms, of benchmark {said:.1f} ms", flush=True)
    overhead = [one - other for one, other in zip(whole, engine, strict=True)]
    for name, seconds in (("whole", whole), ("engine", engine), ("overhead", overhead)):
        values = " ".join(f"{1000 * v:6.1f}" for v in np.percentile(seconds, (50, 90, 99, 100)))
        print(f"{name:<9} median, p90, p99, highest: {values} ms")
    print(f"engine / benchmark: {median(ratios):.2f} (median of the turns)")


if __name__ == "__main__":
    main()
