"""Devices with a speed and a connection: the duration of a task follows from its steps and its bytes.

A task downloads the message, takes its local steps, and uploads the update:

    seconds = (bytes down / download + steps * seconds per step + bytes up / upload) * jitter

The jitter is log-normal with median 1, one draw for each task. Each client is always the same kind of device,
drawn according to the shares of the kinds.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import exp, isfinite
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from offbeat.draws import uniform
from offbeat.errors import InputError, check_attributes
from offbeat.schedule.parsing import check_number, format_spec
from offbeat.schedule.rng import Rng

if TYPE_CHECKING:
    from offbeat.schedule.delays import Delay, DelayFunction

_COLUMNS = ("seconds_per_step", "download", "upload", "share")


class TaskWork(NamedTuple):
    """The work of a task."""

    steps: Callable[[int], int]  # local steps of a client's task
    down: float  # bytes
    up: float


@runtime_checkable
class WorkDelay(Protocol):
    """Delays that follow from the work of a task."""

    def for_work(self, work: TaskWork) -> "Delay": ...


class DeviceProfile(NamedTuple):
    """One kind of device.

    Attributes:
        seconds_per_step: The time of a local step.
        download: Bytes per second from the server.
        upload: Bytes per second to the server.
        share: The share of the clients that have such a device, relative to the other kinds.
    """

    seconds_per_step: float
    download: float
    upload: float
    share: float = 1.0


@dataclass(frozen=True)
class Devices:
    """Clients with these kinds of devices.

    Attributes:
        profiles: The kinds of devices.
        jitter: The standard deviation of the logarithm of a task's time.
        work: The steps and bytes of a task; the engine sets them.
    """

    profiles: Sequence[DeviceProfile]
    jitter: float = 0.0
    work: TaskWork | None = None

    def __post_init__(self) -> None:
        check_number("the jitter of devices", self.jitter)
        if not self.profiles:
            raise InputError("there is no device: give at least one profile.")
        for profile in self.profiles:
            check_attributes("a device", profile, DeviceProfile._fields, "an offbeat.DeviceProfile")
            check_number("seconds_per_step of a device", profile.seconds_per_step)
            check_number("the download speed of a device", profile.download, strict=True)
            check_number("the upload speed of a device", profile.upload, strict=True)
            check_number("the share of a device", profile.share)
        if not any(profile.share for profile in self.profiles):
            raise InputError("the shares of all devices are 0: give at least one of them a share.")

    def for_work(self, work: TaskWork) -> "Delay":
        return replace(self, work=work)

    def bind(self, draws: Rng, population: int) -> "DelayFunction":
        work, jitter, quantile = self.work, self.jitter, NormalDist().inv_cdf
        if work is None:
            raise InputError(
                "the time of a task on a device follows from its steps and bytes, which a schedule without a "
                "model does not know: use a run, or other delays."
            )
        bounds = list(accumulate(profile.share for profile in self.profiles))
        seed, profiles = draws.seed, self.profiles
        transfers = [work.down / each.download + work.up / each.upload for each in profiles]

        def seconds(client: int, visit: int, u: float) -> float:
            kind = bisect_right(bounds, uniform(seed, "device", client) * bounds[-1])
            once = transfers[kind] + work.steps(client) * profiles[kind].seconds_per_step
            return once * exp(jitter * quantile(u or 2**-54)) if jitter else once

        return seconds


@dataclass(frozen=True)
class DeviceFile:
    """Kinds of devices from a file of comma-separated values, one on each line.

    The first line names the columns: seconds_per_step, download, upload and, if kinds differ in number,
    share; speeds are in bytes per second.
    """

    path: str

    def __str__(self) -> str:
        return format_spec("devices", self.path)

    def for_work(self, work: TaskWork) -> "Delay":
        return self._devices().for_work(work)

    def bind(self, draws: Rng, population: int) -> "DelayFunction":
        return self._devices().bind(draws, population)

    def _devices(self) -> Devices:
        try:
            text = Path(self.path).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise InputError(f"cannot read the devices in {self.path}: {reason}.") from None
        lines = [
            (number, [cell.strip() for cell in line.split(",")])
            for number, line in enumerate(text.splitlines(), start=1)
            if line.strip()
        ]
        heading = lines.pop(0)[1] if lines else []
        unknown = [name for name in heading if name not in _COLUMNS]
        if unknown or not set(_COLUMNS[:3]) <= set(heading):
            raise InputError(
                f"{self.path}, line 1: a file of devices begins with its columns, "
                f"{', '.join(_COLUMNS[:3])} and, optionally, share."
            )
        profiles = []
        for number, cells in lines:
            try:
                values = dict(zip(heading, map(float, cells), strict=True))
                if not all(map(isfinite, values.values())):
                    raise ValueError
            except ValueError:
                raise InputError(
                    f"{self.path}, line {number}: '{','.join(cells)}' is not a device: write {len(heading)} "
                    "numbers."
                ) from None
            profiles.append(DeviceProfile(**values))
        try:
            return Devices(tuple(profiles))
        except InputError as error:
            raise InputError(f"{self.path}: {error}") from None


# Speeds relative to a medium phone, and links in bytes per second: round numbers within what AI-Benchmark's
# scores of 333 phones (a factor of 40 between the slowest and the fastest) and Mahimahi's cellular traces
# (0.5 to 17 Mbit/s) show.
PHONES = (
    DeviceProfile(0.4, 1.5e6, 6e5, 0.25),
    DeviceProfile(1.0, 6e5, 2.5e5, 0.5),
    DeviceProfile(4.0, 1.2e5, 6e4, 0.25),
)


@dataclass(frozen=True)
class Phones:
    """Fast, medium and slow phones.

    Attributes:
        seconds: The time of a local step on a medium phone.
        jitter: The standard deviation of the logarithm of a task's time.
    """

    seconds: float
    jitter: float = 0.2

    def __post_init__(self) -> None:
        check_number("the seconds of a step on a phone", self.seconds)
        check_number("the jitter of phones", self.jitter)

    def __str__(self) -> str:
        jitter = [self.jitter] if self.jitter != Phones.jitter else []
        return format_spec("phones", self.seconds, *jitter)

    def for_work(self, work: TaskWork) -> "Delay":
        return self._devices().for_work(work)

    def bind(self, draws: Rng, population: int) -> "DelayFunction":
        return self._devices().bind(draws, population)

    def _devices(self) -> Devices:
        phones = [each._replace(seconds_per_step=self.seconds * each.seconds_per_step) for each in PHONES]
        return Devices(tuple(phones), self.jitter)


def for_work(delays: "Delay", work: TaskWork) -> "Delay":
    """The delays of tasks with this work."""
    return delays.for_work(work) if isinstance(delays, WorkDelay) else delays
