"""The station's config: line.yaml -> checked settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from anomaly.config.load import explain, read_yaml
from anomaly.errors import ConfigError

Register = Annotated[int, Field(ge=0, le=65535)]
Name = Annotated[str, Field(pattern=r"^[\w-]+$", max_length=40)]
Share = Annotated[float, Field(ge=0, le=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class CameraSettings(_Section):
    """One camera.

    Attributes:
        source: see `cameras.open_camera`.
        model: folder of the model that judges its pictures; the station's by default.
        features: values that a GenICam camera is given, `ExposureTime: 5000` say.
    """

    source: str
    model: Path | None = None
    features: dict[str, str | float | bool] = {}


class TriggerSettings(_Section):
    """What says that a part is there; one or several.

    Attributes:
        counter: holding register in which the PLC counts parts.
        coil: that the PLC sets for each part, and the station clears.
        http: address that takes POST /trigger.
        stdin: whether each line of the standard input is a part.
        interval: seconds from one part to the next.
        motion: share of the first camera's picture that changes when a part comes.
    """

    counter: Register | None = None
    coil: Register | None = None
    http: str | None = None
    stdin: bool = False
    interval: Annotated[float, Field(gt=0)] | None = None
    motion: Annotated[float, Field(gt=0, lt=1)] | None = None


class PlcSettings(_Section):
    """A PLC that is a Modbus TCP server.

    Attributes:
        address: host and port; 502 by default.
        unit: Modbus unit.
        verdict_register: of three: verdict code, part number (high word, low word).
        status_register: of two: heartbeat, ready.
    """

    address: str
    unit: Annotated[int, Field(ge=0, le=255)] = 1
    verdict_register: Register = 0
    status_register: Register = 3


class StationSettings(_Section):
    """A whole station.

    Attributes:
        cameras: by name; a part's verdict is that of all their pictures.
        part_seconds: from one part to the next; a verdict that takes longer is late.
        without_verdict: what the PLC is sent for a part that is late or lost.
        record: SQLite file of all parts.
        keep_good: share of good parts whose pictures are kept.
        keep_pictures: megabytes for pictures.
        webhook: address that takes each part as JSON.
        mqtt: broker and topic that take it.
        csv: file that takes it.
    """

    model: Path | None = None
    cameras: Annotated[dict[Name, CameraSettings], Field(min_length=1)]
    trigger: TriggerSettings
    part_seconds: Annotated[float, Field(gt=0, le=3600)]
    without_verdict: Literal["reject", "nothing"] = "reject"
    plc: PlcSettings | None = None
    record: Path
    keep_good: Share = 0.02
    keep_pictures: Annotated[int, Field(ge=0)] = 2000
    webhook: str | None = None
    mqtt: str | None = None
    csv: Path | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        trigger = self.trigger
        if not trigger.model_dump(exclude_defaults=True):
            raise ValueError(
                f"trigger is empty: nothing says when a part is there; give one of "
                f"{', '.join(TriggerSettings.model_fields)}"
            )
        by_plc = [name for name in ("counter", "coil") if getattr(trigger, name) is not None]
        if len(by_plc) == 2:
            raise ValueError("trigger.counter and trigger.coil count the same parts; give one")
        if by_plc and self.plc is None:
            raise ValueError(f"trigger.{by_plc[0]} needs a PLC; give plc.address")
        for name, camera in self.cameras.items():
            if camera.model is None and self.model is None:
                raise ValueError(
                    f"no model judges camera {name}; give model, or cameras.{name}.model"
                )
        if self.plc is not None:
            _check_registers(self.plc, trigger.counter)
        for key, address in (
            ("plc.address", self.plc and self.plc.address),
            ("trigger.http", trigger.http),
        ):
            if address is not None:
                host_and_port(address, key)
        return self


def _check_registers(plc: PlcSettings, counter: int | None) -> None:
    taken = [*range(plc.verdict_register, plc.verdict_register + 3)]
    taken += [*range(plc.status_register, plc.status_register + 2)]
    taken += [] if counter is None else [counter]
    if twice := next((register for register in taken if taken.count(register) > 1), None):
        raise ValueError(
            f"register {twice} has two meanings: plc.verdict_register takes three, "
            "plc.status_register two, trigger.counter one"
        )


def host_and_port(address: str, key: str) -> tuple[str, int]:
    """The two in an address such as `192.168.0.10:502`; 502 where it names no port.

    Raises:
        ValueError: it can't be one.
    """
    try:
        parts = urlsplit(f"//{address}")
        if parts.hostname and parts.netloc == address and "@" not in address:
            return parts.hostname, 502 if parts.port is None else parts.port
    except ValueError:
        pass
    raise ValueError(f"{key} is {address!r}: must be HOST:PORT, 192.168.0.10:502 say")


def load_settings(file: Path) -> StationSettings:
    """Read a config.

    Raises:
        ConfigError: it can't be read, or a setting can't be; a line for each mistake.
    """
    if not file.is_file():
        raise ConfigError(f"there is no config {file}; docs/station.md shows one to begin with")
    try:
        return StationSettings.model_validate(
            {"record": file.with_suffix(".sqlite"), **read_yaml(file)}
        )
    except ValidationError as error:
        lines = [f"{file}: {explain(dict(mistake), StationSettings)}" for mistake in error.errors()]
        raise ConfigError("\n  ".join(lines)) from None
