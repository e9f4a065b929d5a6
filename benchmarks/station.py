"""What a station adds to the engine's time for a part, and whether `benchmark` foretells that time.

    python -m benchmarks.station --model RUN --images FOLDER

A PLC counts the next part once it has the verdict of the last one, and notes both times. Of that
time the engine's is taken off, which its rows say: from when it was given the picture until its
answer was to be recorded. What is left is reading the counter, three rows in the record, reading
the picture's file, and writing the verdict. In turns with it, `anomaly benchmark` measures the same
model and images.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from pymodbus.server import ModbusTcpServer
from pymodbus.simulator import DataType, SimData, SimDevice

from benchmarks.inputs import machine

ANOMALY = [sys.executable, "-m", "anomaly"]


async def station(options: argparse.Namespace, folder: Path) -> list[float]:
    """Milliseconds of each part, from its count until its verdict was written."""
    told: dict[int, float] = {}
    ready = asyncio.Event()

    async def seen(function: int, _: int, address: int, __: int, ___: Any, values: Any) -> None:
        if function == 16 and address == 0:
            told.setdefault((values[1] << 16) + values[2], time.monotonic())
        if function == 16 and address == 3 and values[1]:
            ready.set()

    zeros = [SimData(0, values=[0] * 16, datatype=DataType.REGISTERS)]
    bits = [SimData(0, values=[False] * 16, datatype=DataType.BITS)]
    device = SimDevice(1, (bits, bits, zeros, zeros), action=seen)
    server = ModbusTcpServer(device, address=("127.0.0.1", options.port))
    await server.serve_forever(background=True)
    settings = {
        "model": str(options.model.absolute()),
        "cameras": {"top": {"source": str(options.images.absolute())}},
        "trigger": {"counter": 10},
        "plc": {"address": f"127.0.0.1:{options.port}"},
        "part_seconds": 60,
    }
    config = folder / "line.yaml"
    config.write_text(json.dumps(settings))  # which is YAML, too
    process = subprocess.Popen(
        [*ANOMALY, "station", "--device", "cpu", "--config", str(config)], stdout=subprocess.DEVNULL
    )
    await ready.wait()
    await asyncio.sleep(1)
    times = []
    for number in range(1, options.parts + 1):
        await server.async_setValues(1, 16, 10, [number])
        came = time.monotonic()
        while number not in told:
            await asyncio.sleep(0.005)
        times.append(1000 * (told[number] - came))
    process.terminate()
    await asyncio.to_thread(process.wait)
    await server.shutdown()
    return times


def foretold(options: argparse.Namespace) -> float:
    """What `benchmark` says of half of the parts, in milliseconds."""
    given = ["--model", str(options.model), "--images", str(options.images), "--device", "cpu"]
    (figures,) = json.loads(subprocess.check_output([*ANOMALY, "benchmark", "--json", *given]))
    return float(figures["milliseconds"]["whole part"][0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--parts", type=int, default=100, help="of each turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--port", type=int, default=5020)
    options = parser.parse_args()
    print(f"{machine()}; {options.turns} turns of {options.parts} parts")
    whole, engine, ratios = list[float](), list[float](), list[float]()
    for _ in range(options.turns):
        with tempfile.TemporaryDirectory() as folder:
            whole += asyncio.run(station(options, Path(folder)))
            with sqlite3.connect(Path(folder) / "line.sqlite") as record:
                rows = record.execute("SELECT line FROM parts ORDER BY id").fetchall()
        took = [float(json.loads(line)["milliseconds"]) for (line,) in rows]
        engine, said = engine + took, foretold(options)
        ratios.append(median(took) / said)
        print(f"median of the engine {median(took):.1f} ms, of benchmark {said:.1f} ms", flush=True)
    overhead = np.subtract(whole, engine)
    for name, values in (("whole", whole), ("engine", engine), ("overhead", overhead)):
        text = " ".join(f"{v:6.1f}" for v in np.percentile(values, (50, 90, 99, 100)))
        print(f"{name:<9} median, p90, p99, highest: {text} ms")
    print(f"engine / benchmark: {median(ratios):.2f} (median of the turns)")


if __name__ == "__main__":
    main()
