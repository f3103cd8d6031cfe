"""The performance of a cluster: its devices and links, from records or from measurements of this machine.

A record is a TOML table. Rung ships those in `records/`; a user's file adds to them. Imports no torch.
"""

from __future__ import annotations

import itertools
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rung.errors import ConfigError, nearest

_RECORDS = Path(__file__).parent / "records"
HERE = "here"  # the name of this machine's record; `rung calibrate` writes it to HERE_FILE
HERE_FILE = Path("runs/hardware.toml")
_MIB = 2**20
Curve = tuple[tuple[float, float], ...]
# (operations of a matrix product, share of the peak rate), measured on an H200 in half and in full precision.
_EFFICIENCY: Curve = ((1e6, 0.0004), (1e8, 0.02), (1e9, 0.12), (1e10, 0.42), (1e11, 0.68), (1e12, 0.75), (1e13, 0.78))
_FULL_EFFICIENCY: Curve = ((1e6, 0.001), (1e8, 0.08), (1e9, 0.45), (1e10, 0.72), (1e11, 0.76), (1e13, 0.76))


@dataclass(frozen=True)
class Device:
    """A device's record. Rates are per second; `records/devices.toml` explains the fields."""

    name: str
    source: str
    kind: str  # cuda or cpu
    memory: int  # bytes available to processes
    bandwidth: float
    link: str
    matrix: Mapping[str, float]
    matrix_efficiency: Curve = _EFFICIENCY  # in half precision
    full_efficiency: Curve = _FULL_EFFICIENCY  # in fp32 and fp64
    bandwidth_efficiency: float = 0.85
    launch: float = 2e-6
    # Seconds of the host: for an operation of forward or backward, for one that calls a library (products,
    # convolutions, norms, attention; None: the same), for one of the update (None: the same), for a module's call, for
    # a kernel that a library issues within an operation, for a step beside these, and for a message with the hooks
    # around it: a gather or scatter, which FSDP makes, and any other. Not on CPUs, where a link's record has all of it.
    issue: float = 9e-6
    issue_large: float | None = None
    issue_in_update: float | None = None
    call: float = 0.0
    inner: float = 5e-6
    begin: float = 0.0
    send: float = 2e-4
    gather: float = 7e-4
    workspaces: Mapping[str, int] = field(default_factory=lambda: {"forward": 32 * _MIB, "backward": 32 * _MIB})
    context: int = 850 * _MIB
    communicator: int = 300 * _MIB
    # What `--offload cpu` uses, for each device: the link to the host's memory one way, and the bytes that the host
    # reads and writes in a second while it updates parameters.
    host_link: float = 25e9
    host_bandwidth: float = 60e9
    overlaps: bool = True  # whether communication overlaps with computation
    rates: Mapping[str, Curve] = field(default_factory=dict)  # measured: operations of a product -> operations/s
    bandwidths: Curve = ()  # measured: bytes of an operation -> bytes/s
    # Measured: an operation's name -> operations of a call -> operations/s; in bytes if it computes no products.
    kernels: Mapping[str, Curve] = field(default_factory=dict)

    def product_rate(self, dtype: str, flops: float) -> float:
        """Operations per second of a matrix product with `flops` operations."""
        measured = self.rates.get(dtype)
        if measured:
            return interpolate(measured, flops)
        peak = self.matrix.get(dtype) or self.matrix.get("fp32") or max(self.matrix.values())
        in_full = dtype in ("fp32", "fp64")
        return peak * interpolate(self.full_efficiency if in_full else self.matrix_efficiency, flops)

    def with_tf32(self) -> Device:
        """The device if torch may round the factors of fp32 products to TF32."""
        matrix = {**self.matrix, "fp32": self.matrix.get("tf32", self.matrix.get("fp32", 0.0))}
        rates = {**self.rates, "fp32": self.rates["tf32"]} if "tf32" in self.rates else self.rates
        return replace(self, matrix=matrix, rates=rates, full_efficiency=self.matrix_efficiency)

    def moving_rate(self, num_bytes: float) -> float:
        """Bytes per second of an operation that reads and writes `num_bytes`."""
        if self.bandwidths:
            return interpolate(self.bandwidths, num_bytes)
        return self.bandwidth * self.bandwidth_efficiency


@dataclass(frozen=True)
class Link:
    """A link's record: bandwidth in bytes per second one way, latency in seconds."""

    name: str
    source: str
    bandwidth: float
    latency: float
    efficiency: float = 0.9
    # Measured: (collective, ranks) -> bytes -> seconds.
    times: Mapping[tuple[str, int], Curve] = field(default_factory=dict)
    # Measured: ranks -> extra seconds of a message in the middle of a step.
    besides: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Cluster:
    """Identical machines with identical devices."""

    device: Device
    nodes: int
    per_node: int
    inside: Link
    between: Link | None = None
    # By the number of busy devices of a machine: processes on a CPU share its cores.
    shared: Mapping[int, Device] = field(default_factory=dict)

    def device_for(self, num_ranks: int) -> Device:
        """The device's record while `num_ranks` ranks compute."""
        return self.shared.get(min(num_ranks, self.per_node), self.device)

    def with_tf32(self) -> Cluster:
        """The cluster for a task that lets torch round the factors of fp32 products to TF32."""
        shared = {count: device.with_tf32() for count, device in self.shared.items()}
        return replace(self, device=self.device.with_tf32(), shared=shared)

    @property
    def num_devices(self) -> int:
        return self.nodes * self.per_node

    def describe(self) -> str:
        machines = f"{self.nodes} machines of {self.per_node}" if self.nodes > 1 else f"{self.per_node}"
        links = f"{self.inside.name}" + (f", {self.between.name} between machines" if self.between else "")
        return f"{machines} x {self.device.name} ({self.device.memory / 2**30:.0f} GiB), {links}"

    def link_of(self, ranks: tuple[int, ...]) -> Link:
        """The slowest link among sorted ranks, which are numbered machine by machine."""
        if self.between is None or ranks[0] // self.per_node == ranks[-1] // self.per_node:
            return self.inside
        return self.between


def devices(extra: Path | None = None) -> dict[str, Device]:
    """All known devices: those of Rung, and those of `extra` or else of this machine's calibration."""
    found = {name: _make(Device, name, table) for name, table in _tables("devices.toml").items()}
    for name, table in (_user_tables(extra).get("devices") or {}).items():
        found[name] = _make(Device, name, table, found.get(table.get("like", "")))
    return found


def links(extra: Path | None = None) -> dict[str, Link]:
    found = {name: _make(Link, name, table) for name, table in _tables("links.toml").items()}
    for name, table in (_user_tables(extra).get("links") or {}).items():
        found[name] = _make(Link, name, table, found.get(table.get("like", "")))
    return found


_COUNTED = re.compile(r"^(?:(\d+)\s*(?:nodes?|machines?|hosts?)?\s*x\s*)?(?:(\d+)\s*x?\s*)?([A-Za-z][\w.-]*)$", re.I)
_RATE = re.compile(r"^([\d.]+)\s*([KMGT]?)(b|bit|B)(?:it)?(?:/s|ps)$")


def parse_cluster(text: str, extra: Path | None = None) -> Cluster:
    """Parse `H200`, `8xH100`, or `64 nodes x 8 H200, nvlink4, 400Gb/s`: devices, links inside and between machines."""
    head, *rest = [part.strip() for part in text.split(",")]
    match = _COUNTED.match(head)
    if match is None:
        raise ConfigError(
            f"--cluster {text!r}: expected a number of devices and their name, as in '8xH100' or '4 nodes x 8 H200'."
        )
    first, second, name = match.groups()
    known = devices(extra)
    found = {key.lower(): key for key in known}.get(name.lower())
    if found is None:
        raise ConfigError(
            f"--cluster {text!r}: there is no record of a device {name!r}.{nearest(name, list(known))} Known "
            f"devices are {', '.join(known)}; --hardware FILE adds your own."
        )
    if first is None and second is None and found == HERE:
        raise ConfigError(f"--cluster {text!r}: give the number of processes, as in '2xhere'.")
    nodes, per_node = (int(first), int(second)) if first and second else (1, int(first or second or 1))
    if nodes < 1 or per_node < 1:
        raise ConfigError(f"--cluster {text!r}: a cluster needs at least one device.")
    device = known[found]
    given = [_link(part, text, extra) for part in rest]
    own = links(extra)
    if device.link not in own:
        raise ConfigError(f"the record of {device.name} names a link {device.link!r} that has no record.")
    inside = own[device.link]
    between: Link | None = own["infiniband"] if nodes > 1 else None
    if len(given) > 2:
        raise ConfigError(f"--cluster {text!r}: give at most two links, inside a machine and between machines.")
    if len(given) == 2:
        inside, between = given
    elif given and nodes > 1:
        between = given[0]
    elif given:
        inside = given[0]
    prefix = f"{found}-"
    shared = {
        int(key[len(prefix) :]): one
        for key, one in known.items()
        if key.startswith(prefix) and key[len(prefix) :].isdigit()
    }
    device = shared.get(per_node, device)
    return Cluster(device, nodes, per_node, inside, between if nodes > 1 else None, shared)


def _link(text: str, whole: str, extra: Path | None) -> Link:
    known = links(extra)
    lower = text.lower()
    name = lower if lower in known else {"nvlink": "nvlink4", "pcie": "pcie4"}.get(lower, "")
    if name:
        return known[name]
    match = _RATE.match(text)
    if match is None:
        raise ConfigError(
            f"--cluster {whole!r}: {text!r} is neither a link ({', '.join(known)}) nor a rate such as 400Gb/s."
        )
    number, scale, unit = match.groups()
    rate = float(number) * {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[scale] / (1 if unit == "B" else 8)
    if rate <= 0:
        raise ConfigError(f"--cluster {whole!r}: the rate of a link must be positive, not {text}.")
    like = known["infiniband"] if rate >= 10e9 else known["ethernet"]
    return replace(like, name=text, source="given on the command line", bandwidth=rate)


def _tables(name: str) -> dict[str, Any]:
    return tomllib.loads((_RECORDS / name).read_text())


def _user_tables(path: Path | None) -> dict[str, Any]:
    path = path or (HERE_FILE if HERE_FILE.exists() else None)
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as hardware records: {error}.") from None


def _make(kind: Any, name: str, table: Mapping[str, Any], like: Any = None) -> Any:
    known = {f.name for f in fields(kind)} - {"name"}
    values = {key: value for key, value in table.items() if key != "like"}
    for key in values:
        if key not in known:
            raise ConfigError(f"the record of {name}: unknown key {key!r}.{nearest(key, sorted(known))}")
    for key in ("matrix_efficiency", "full_efficiency", "bandwidths"):
        if key in values:
            values[key] = tuple((float(a), float(b)) for a, b in values[key])
    for key in ("rates", "kernels"):
        if key in values:
            values[key] = {t: tuple((float(a), float(b)) for a, b in curve) for t, curve in values[key].items()}
    if "besides" in values:
        values["besides"] = {int(count): float(seconds) for count, seconds in values["besides"].items()}
    if "times" in values:
        values["times"] = {
            (key.rpartition(":")[0], int(key.rpartition(":")[2])): tuple((float(a), float(b)) for a, b in curve)
            for key, curve in values["times"].items()
        }
    if like is not None:
        return replace(like, name=name, **values)
    try:
        return kind(name=name, **values)
    except TypeError:
        needed = [f.name for f in fields(kind) if f.name not in ("name", *values) and f.default is f.default_factory]
        raise ConfigError(f"the record of {name} lacks {', '.join(needed) or 'a value'}.") from None


def interpolate(curve: Curve, at: float) -> float:
    """Interpolate a curve of points, linear in the logarithms; constant beyond its ends."""
    if at <= curve[0][0]:
        return curve[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(curve):
        if at <= x1:
            share = (math.log(at) - math.log(x0)) / (math.log(x1) - math.log(x0))
            return math.exp(math.log(y0) + share * (math.log(y1) - math.log(y0)))
    return curve[-1][1]
