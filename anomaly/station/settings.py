"""The station's config: line.yaml -> checked settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from anomaly.config.load import explain, read_yaml
from anomaly.errors import ConfigError

Register = Annotated[int, Field(ge=0, le=65535)]
_OURS = ("127.0.0.1", "localhost", "::1")
Name = Annotated[str, Field(pattern=r"^[\w-]+$", max_length=40)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class CameraSettings(_Section):
    """One camera."""

    source: str  # see `cameras.open_camera`
    model: Path | None = None  # judges its pictures; the station's by default
    features: dict[str, str | float] = {}  # of a GenICam camera: `ExposureTime: 5000`


class TriggerSettings(_Section):
    """What triggers a part; one or several."""

    counter: Register | None = None  # holding register in which the PLC counts parts
    coil: Register | None = None  # that the PLC sets for each part, and the station clears
    http: str | None = None  # address that takes POST /trigger
    stdin: bool = False  # each line of the standard input is a part
    interval: Annotated[float, Field(gt=0)] | None = None  # seconds from one part to the next
    motion: Annotated[float, Field(gt=0, lt=1)] | None = None  # share of the picture that changes


class PlcSettings(_Section):
    """A PLC that is a Modbus TCP server."""

    address: str
    unit: Annotated[int, Field(ge=0, le=255)] = 1
    verdict_register: Register = 0  # of three: verdict code, part number (high word, low word)
    status_register: Register = 3  # of two: heartbeat, ready


class StationSettings(_Section):
    """A whole station."""

    model: Path | None = None
    cameras: Annotated[dict[Name, CameraSettings], Field(min_length=1)]  # of one part, all of them
    trigger: TriggerSettings
    part_seconds: Annotated[float, Field(gt=0, le=3600)]  # a verdict that takes longer is late
    without_verdict: Literal["reject", "nothing"] = (
        "reject"  # sent to the PLC for parts without a verdict in time
    )
    plc: PlcSettings | None = None
    record: Path
    keep_good: Annotated[float, Field(ge=0, le=1)] = 0.02  # share of good parts' pictures
    keep_pictures: Annotated[int, Field(ge=0)] = 2000  # megabytes
    webhook: str | None = None
    mqtt: str | None = None
    csv: Path | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        trigger, plc = self.trigger, self.plc
        if not trigger.model_dump(exclude_defaults=True):
            names = ", ".join(TriggerSettings.model_fields)
            raise ValueError(f"trigger is empty, so no part would be noticed; give one of {names}")
        by_plc = [trigger.counter, trigger.coil].count(None) < 2
        if by_plc and (plc is None or None not in (trigger.counter, trigger.coil)):
            raise ValueError(
                "plc.address needs trigger.counter or trigger.coil, not both, and these need "
                "plc.address"
            )
        if self.model is None and not all(camera.model for camera in self.cameras.values()):
            raise ValueError("a camera has no model to judge its pictures; give model")
        if plc is not None:
            host_and_port(plc.address, "plc.address")
            taken = [plc.verdict_register + place for place in range(3)]
            taken += [plc.status_register, plc.status_register + 1, trigger.counter or -1]
            if len(set(taken)) < len(taken):
                raise ValueError(
                    "plc.verdict_register takes three registers, plc.status_register two, "
                    "trigger.counter one, and some are the same; move one"
                )
        if trigger.http and host_and_port(trigger.http, "trigger.http")[0] not in _OURS:
            raise ValueError(
                f"trigger.http is {trigger.http!r}: must be 127.0.0.1:PORT, this machine"
            )
        return self


def host_and_port(address: str, key: str) -> tuple[str, int]:
    """Host and port of an address such as `192.168.0.10:502`. Raises ValueError."""
    try:
        parts = urlsplit(f"//{address}")
        if parts.hostname and parts.port is not None and parts.netloc == address:
            return parts.hostname, parts.port
    except ValueError:  # the port is no number
        pass
    raise ValueError(f"{key} is {address!r}: must be HOST:PORT, for example 192.168.0.10:502")


def load_settings(file: Path) -> StationSettings:
    """Read a config; a ConfigError with a line for each mistake."""
    values = {"record": file.with_suffix(".sqlite"), **read_yaml(file)}
    try:
        return StationSettings.model_validate(values)
    except ValidationError as error:
        lines = [f"{file}: {explain(dict(mistake), StationSettings)}" for mistake in error.errors()]
        raise ConfigError("\n  ".join(lines)) from None
