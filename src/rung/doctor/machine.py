"""Checks of one machine that need no other process: versions, names, ports, limits, disk, threads.

Each looks first and judges then. What it looks at can be handed in, so that a verdict can be tried out.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import os
import platform
import resource
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rung.doctor.finding import Finding, failed, not_here, ok, warning
from rung.errors import RungError
from rung.launch.precision import SLOW, half_precision_ratio
from rung.machine import core_limit, free_host_bytes
from rung.network import address_among_others, answers, interface_of, split_endpoint
from rung.processes import needed_files, num_cores, silenced
from rung.sizes import human_bytes, human_seconds
from rung.version import VERSION

_TORCH = ((2, 11), (2, 14))  # from, and below
_MIB, _GIB = 2**20, 2**30
_SLOW_NAME_SECONDS = 1.0
_STORE_SECONDS = 3

Resolver = Callable[[str], list[str]]


def check_machine(*, nproc: int, nnodes: int, rdzv: str | None, folder: Path) -> list[Finding]:
    """All of them, for a machine with `nproc` ranks of a job on `nnodes` machines."""
    findings = [
        versions(),
        backends(),
        host_name(is_alone=nnodes == 1, is_told=rdzv is not None),
        loopback(),
        interfaces(),
        *([meeting_place(rdzv)] if rdzv is not None else []),
        shared_memory(nproc),
        open_files(nproc, nnodes),
        locked_memory(),
        host_memory(nproc),
        run_directory(folder),
        threads(nproc),
    ]
    return [*findings, half_precision()]


def versions(torch_version: str = torch.__version__) -> Finding:
    found = f"python {platform.python_version()}, torch {torch_version}, rung {VERSION}"
    numbers = tuple(int(part) for part in torch_version.split("+")[0].split(".")[:2])
    if _TORCH[0] <= numbers < _TORCH[1]:
        return ok("versions", found)
    wanted = f"torch>={_TORCH[0][0]}.{_TORCH[0][1]},<{_TORCH[1][0]}.{_TORCH[1][1]}"
    return warning("versions", found, f"pip install '{wanted}': Rung was tried with no other")


def backends(num_gpus: int | None = None) -> Finding:
    available = [name for name in ("gloo", "nccl", "mpi", "ucc") if getattr(dist, f"is_{name}_available")()]
    if "mpi" not in available and importlib.util.find_spec("mpi4py") is not None:
        available.append("mpi (mpi4py)")
    if dist.rpc.is_available():
        available.append("rpc")
    found = ", ".join(available) or "none"
    gpus = torch.cuda.device_count() if num_gpus is None else num_gpus
    if gpus and "nccl" not in available:
        return failed(
            "backends", f"{found}, but {gpus} GPUs", "install a torch with NCCL, or train with --backend gloo"
        )
    if "gloo" not in available:
        return failed("backends", found, "install a torch with gloo: what lives on the host goes through it")
    return ok("backends", found)


# -- names and ports -------------------------------------------------------------------------------------------------


def host_name(
    name: str | None = None, *, is_alone: bool = True, is_told: bool = False, resolve: Resolver | None = None
) -> Finding:
    """gloo looks the machine's own name up unless it is told an interface: slow, or an error, where that fails. Rung
    tells it one where it starts the ranks itself; torchrun does not (`is_told`)."""
    check, name = "host name", name or socket.gethostname()
    is_told = is_told or is_alone or "GLOO_SOCKET_IFNAME" in os.environ
    address = "127.0.0.1" if is_alone else f"<address of {name}>"
    fix = f"add '{address} {name}' to /etc/hosts" + ("" if is_told else ", or export GLOO_SOCKET_IFNAME=<interface>")
    started = time.monotonic()
    try:
        addresses = (resolve or _addresses)(name)
    except OSError as error:
        found = f"{name} does not resolve: {error.strerror or error}"
        return warning(check, found, fix) if is_told else failed(check, found, fix)
    seconds = time.monotonic() - started
    found = f"{name} is {', '.join(addresses)}"
    if seconds > _SLOW_NAME_SECONDS:
        return warning(check, f"{found}, which took {human_seconds(seconds)}: every rank asks", fix)
    if not is_told and all(address.startswith("127.") or address == "::1" for address in addresses):
        return warning(check, f"{found}: other machines cannot reach that", fix)
    return ok(check, found)


def _addresses(name: str) -> list[str]:
    return list(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(name, None)))


def loopback() -> Finding:
    problem = _cannot_listen("127.0.0.1")
    if problem is None:
        return ok("loopback", "ranks of this machine can listen there")
    return failed("loopback", f"nobody can listen at 127.0.0.1: {problem}", "ip link set lo up")


def interfaces(named: dict[str, str] | None = None) -> Finding:
    """Those that gloo and NCCL are told to use."""
    wanted = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    named = {key: os.environ[key] for key in wanted if key in os.environ} if named is None else named
    there = [name for _, name in socket.if_nameindex()]
    if not named:
        return ok("interfaces", f"none is chosen by hand; there are {', '.join(there)}")
    for variable, names in named.items():
        prefixes = [name.lstrip("=") for name in names.split(",") if not name.startswith("^")]
        missing = [name for name in prefixes if not any(one.startswith(name) for one in there)]
        if missing:
            fix = f"export {variable}=<one of {', '.join(there)}>, or unset {variable}"
            return failed("interfaces", f"{variable}={names}, but there is no {', '.join(missing)} here", fix)
    return ok("interfaces", ", ".join(f"{key}={value}" for key, value in named.items()))


def meeting_place(rdzv: str) -> Finding:
    """Whether machines can meet at HOST:PORT: it is free here, or a store answers there."""
    check = "meeting place"
    try:
        host, port = split_endpoint(rdzv)
        own, is_ours = address_among_others(host, port)
    except (RungError, ValueError) as error:
        return failed(check, str(error), "give --rdzv HOST:PORT with a host that every machine can reach")
    through = f"through {interface_of(own) or own}"
    if answers(host, port):
        if _is_store(host, port):
            return ok(check, f"a store answers at {rdzv}, {through}")
        fix = f"use another port: {_free_port()} is free" if is_ours else "stop it, or use another port"
        return failed(check, f"something else than a store listens at {rdzv}", fix)
    if not is_ours:
        return ok(check, f"{rdzv} is another machine, reached {through}; nobody listens there yet")
    problem = _cannot_listen(own, port)
    if problem is not None:
        return failed(check, f"{rdzv} cannot be listened at: {problem}", f"use another port: {_free_port()} is free")
    return ok(check, f"{rdzv} is this machine, and the port is free")


def _is_store(host: str, port: int) -> bool:
    """Whether torch's store answers. What listens may also say nothing at all, and torch's client then waits without
    end, whatever it is told: it is left to itself."""
    answered = threading.Event()

    def ask() -> None:
        patience = datetime.timedelta(seconds=_STORE_SECONDS)
        with contextlib.suppress(RuntimeError):
            store: Any = dist.TCPStore(  # type: ignore[attr-defined]
                host, port, None, False, timeout=patience, wait_for_workers=False
            )
            store.check(["rung"])
            answered.set()

    asking = threading.Thread(target=ask, name="rung-ask", daemon=True)
    with silenced():
        asking.start()
        asking.join(_STORE_SECONDS)
    return answered.is_set()


def _cannot_listen(address: str, port: int = 0) -> str | None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
            probe.listen()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


# -- room ------------------------------------------------------------------------------------------------------------


def shared_memory(nproc: int, path: str = "/dev/shm", room: tuple[int, int] | None = None) -> Finding:
    """Loader processes hand batches over in it, and NCCL the data between GPUs without direct links. `room` is
    (size, free)."""
    check = "shared memory"
    if room is None:
        if not os.path.isdir(path):
            return failed(check, f"there is no {path}", f"mount a tmpfs there: mount -t tmpfs tmpfs {path}")
        stat = os.statvfs(path)
        room = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    size, free = room
    found = f"{human_bytes(free)} free of {human_bytes(size)} in {path}"
    fix = f"give the container more (docker --shm-size=8g), or mount -o remount,size=8g {path}"
    if free < 16 * _MIB * nproc:
        return failed(check, found, fix)
    return warning(check, found, fix) if free < 256 * _MIB * nproc else ok(check, found)


def open_files(nproc: int, nnodes: int, limit: int | None = None) -> Finding:
    """A rank has a connection to every other, and its loaders have theirs."""
    # The hard one: each job raises its soft limit to that.
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[1] if limit is None else limit
    if soft == resource.RLIM_INFINITY:
        return ok("open files", "no limit")
    needed = needed_files(nproc * nnodes, nproc)
    if soft < needed:
        return failed("open files", f"limit {soft}, and {needed} are needed", f"ulimit -n {max(65536, needed)}")
    if soft < 1024:
        return warning("open files", f"limit {soft}", "ulimit -n 65536")
    return ok("open files", f"limit {soft:,}")


def locked_memory(limit: int | None = None, cards: list[str] | None = None) -> Finding:
    """InfiniBand and RoCE register memory, which is locked in place."""
    if cards is None:
        cards = [path.name for path in Path("/sys/class/infiniband").glob("*")]
    if not cards:
        return not_here("locked memory", "no InfiniBand or RoCE card, which alone needs it")
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    if soft == resource.RLIM_INFINITY:
        return ok("locked memory", f"no limit; {', '.join(cards)}")
    found = f"limit {human_bytes(soft)}, with {', '.join(cards)}"
    return warning("locked memory", found, "ulimit -l unlimited (docker: --ulimit memlock=-1)")


def host_memory(nproc: int, free: int | None = None) -> Finding:
    free = free_host_bytes() if free is None else free
    if free is None:
        return not_here("host memory", "this system does not say how much is free")
    found = f"{human_bytes(free)} free for {nproc} rank{'s' * (nproc != 1)}"
    if free < nproc * _GIB // 2:
        return failed(
            "host memory", found, "end other programs, or use fewer processes: torch alone takes 300 MiB each"
        )
    if free < 2 * nproc * _GIB:
        return warning("host memory", found, "end other programs, or use fewer processes")
    return ok("host memory", found)


def run_directory(folder: Path, free: int | None = None) -> Finding:
    """Whether a run can write there, and for how long."""
    check, above = "run directory", folder.resolve()
    while not above.exists():
        above = above.parent
    try:
        with tempfile.NamedTemporaryFile(dir=above) as file:
            file.write(b"rung" * _MIB)
            file.flush()
            started = time.monotonic()
            os.fsync(file.fileno())
            seconds = time.monotonic() - started
    except OSError as error:
        return failed(check, f"nobody can write in {above}: {error.strerror or error}", "choose another with --out DIR")
    left = shutil.disk_usage(above).free if free is None else free
    found = f"{human_bytes(left)} free in {folder}/, 4 MiB safe on the disk after {human_seconds(seconds)}"
    if left < _GIB:
        return failed(check, found, "make room, or choose another disk with --out DIR: checkpoints need it")
    if left < 10 * _GIB:
        return warning(check, found, "make room for checkpoints, or keep fewer with --keep")
    return ok(check, found)


# -- computing -------------------------------------------------------------------------------------------------------


def threads(nproc: int, cores: int | None = None, limit: float | None = None) -> Finding:
    """More threads than cores wait for each other. Rung gives each rank its share unless OMP_NUM_THREADS says more."""
    cores = num_cores() if cores is None else cores
    limit = core_limit() if limit is None else limit
    usable = min(cores, limit) if limit is not None else cores
    asked = os.environ.get("OMP_NUM_THREADS", "")
    each = int(asked) if asked.isdigit() else max(1, cores // nproc)
    found = f"{nproc} x {each} threads on {usable:g} cores"
    share = max(1, int(usable // nproc))
    if each * nproc > 1.01 * usable and each > share:
        why = "" if limit is None or limit >= cores else f" (the container may use {limit:g} of {cores})"
        return warning("threads", found + why, f"export OMP_NUM_THREADS={share}")
    if nproc > usable:
        return warning(
            "threads", f"{found}: ranks take turns", f"use --nproc {max(1, int(usable))} or fewer on this CPU"
        )
    return ok("threads", found)


def half_precision(ratios: dict[str, float] | None = None) -> Finding:
    """Some CPUs have no arithmetic for bf16 or fp16, and compute it hundreds of times slower than fp32."""
    check = "half precision"
    if ratios is None:
        if torch.cuda.is_available():
            return not_here(check, "training is on GPUs; the CPU's does not matter")
        ratios = {"bf16": half_precision_ratio(torch.bfloat16), "fp16": half_precision_ratio(torch.float16)}
    found = "on the CPU a matrix product takes " + ", ".join(f"{r:.1f}x in {name}" for name, r in ratios.items())
    slow = [name for name, ratio in ratios.items() if ratio >= SLOW]
    if slow:
        return warning(check, f"{found} of the time in fp32", f"use --precision fp32 here, not {' or '.join(slow)}")
    return ok(check, f"{found} of the time in fp32")
