"""Checks of one machine that need no other process: versions, names, ports, limits, disk, threads.

Tests can pass in what a check would observe, to try out its verdict.
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

from rung.errors import RungError
from rung.hardware.doctor.finding import Finding, failed, not_here, ok, warning
from rung.launch.half_precision import SLOW, half_precision_ratio
from rung.spec.version import VERSION
from rung.system.host import core_limit, free_host_bytes
from rung.system.network import address_among_others, answers, interface_of, split_endpoint
from rung.system.processes import needed_files, num_cores, silenced
from rung.system.units import human_bytes, human_seconds

_TORCH = ((2, 11), (2, 14))  # first supported version, first unsupported one
_MIB, _GIB = 2**20, 2**30
_SLOW_NAME_SECONDS = 1.0
_STORE_SECONDS = 3

Resolver = Callable[[str], list[str]]


def check_machine(*, nproc: int, nnodes: int, rdzv: str | None, folder: Path) -> list[Finding]:
    """Run all checks, for a machine with `nproc` ranks of a job on `nnodes` machines."""
    return [
        versions(),
        backends(),
        host_name(is_alone=nnodes == 1, has_interface=rdzv is not None),
        loopback(),
        interfaces(),
        *([rendezvous_endpoint(rdzv)] if rdzv is not None else []),
        shared_memory(nproc),
        open_files(nproc, nnodes),
        locked_memory(),
        host_memory(nproc),
        run_directory(folder),
        threads(nproc),
        half_precision(),
    ]


def versions(torch_version: str = torch.__version__) -> Finding:
    found = f"python {platform.python_version()}, torch {torch_version}, rung {VERSION}"
    numbers = tuple(int(part) for part in torch_version.split("+")[0].split(".")[:2])
    if _TORCH[0] <= numbers < _TORCH[1]:
        return ok("versions", found)
    wanted = f"torch>={_TORCH[0][0]}.{_TORCH[0][1]},<{_TORCH[1][0]}.{_TORCH[1][1]}"
    return warning("versions", found, f"pip install '{wanted}': Rung is tested with these versions only")


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
        return failed("backends", found, "install a torch with gloo: messages from host memory go through it")
    return ok("backends", found)


# -- names and ports -------------------------------------------------------------------------------------------------


def host_name(
    name: str | None = None, *, is_alone: bool = True, has_interface: bool = False, resolve: Resolver | None = None
) -> Finding:
    """Check that this machine's name resolves: without an interface, gloo needs it, and is slow or fails otherwise.

    `has_interface`: Rung sets gloo's interface where it starts the ranks itself; torchrun does not.
    """
    check, name = "host name", name or socket.gethostname()
    has_interface = has_interface or is_alone or "GLOO_SOCKET_IFNAME" in os.environ
    address = "127.0.0.1" if is_alone else f"<address of {name}>"
    fix = f"add '{address} {name}' to /etc/hosts"
    fix += "" if has_interface else ", or export GLOO_SOCKET_IFNAME=<interface>"
    started = time.monotonic()
    try:
        addresses = (resolve or _addresses)(name)
    except OSError as error:
        found = f"{name} does not resolve: {error.strerror or error}"
        return warning(check, found, fix) if has_interface else failed(check, found, fix)
    seconds = time.monotonic() - started
    found = f"{name} is {', '.join(addresses)}"
    if seconds > _SLOW_NAME_SECONDS:
        return warning(check, f"{found}, which took {human_seconds(seconds)}: every rank looks it up", fix)
    if not has_interface and all(address.startswith("127.") or address == "::1" for address in addresses):
        return warning(check, f"{found}: other machines cannot reach it", fix)
    return ok(check, found)


def _addresses(name: str) -> list[str]:
    return list(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(name, None)))


def loopback() -> Finding:
    problem = _listen_error("127.0.0.1")
    if problem is None:
        return ok("loopback", "ranks of this machine can listen there")
    return failed("loopback", f"cannot listen at 127.0.0.1: {problem}", "ip link set lo up")


def interfaces(named: dict[str, str] | None = None) -> Finding:
    """Check the interfaces that environment variables set for gloo and NCCL."""
    wanted = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    named = {key: os.environ[key] for key in wanted if key in os.environ} if named is None else named
    there = [name for _, name in socket.if_nameindex()]
    if not named:
        return ok("interfaces", f"none is set; this machine has {', '.join(there)}")
    for variable, names in named.items():
        prefixes = [name.lstrip("=") for name in names.split(",") if not name.startswith("^")]
        missing = [name for name in prefixes if not any(one.startswith(name) for one in there)]
        if missing:
            fix = f"export {variable}=<one of {', '.join(there)}>, or unset {variable}"
            return failed("interfaces", f"{variable}={names}, but there is no {', '.join(missing)} here", fix)
    return ok("interfaces", ", ".join(f"{key}={value}" for key, value in named.items()))


def rendezvous_endpoint(rdzv: str) -> Finding:
    """Check that HOST:PORT can serve the rendezvous: the port is free here, or a store answers there."""
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
        fix = f"use another port: {_free_port()} is free" if is_ours else "stop that program, or use another port"
        return failed(check, f"a program other than a store listens at {rdzv}", fix)
    if not is_ours:
        return ok(check, f"{rdzv} is another machine, reached {through}; nothing listens there yet")
    problem = _listen_error(own, port)
    if problem is not None:
        return failed(check, f"cannot listen at {rdzv}: {problem}", f"use another port: {_free_port()} is free")
    return ok(check, f"{rdzv} is this machine, and the port is free")


def _is_store(host: str, port: int) -> bool:
    """Whether a torch store answers. If the program there sends nothing, torch's client waits forever despite its
    timeout, so it runs in a daemon thread that is abandoned."""
    answered = threading.Event()

    def connect() -> None:
        timeout = datetime.timedelta(seconds=_STORE_SECONDS)
        with contextlib.suppress(RuntimeError):
            store: Any = dist.TCPStore(  # type: ignore[attr-defined]
                host, port, None, False, timeout=timeout, wait_for_workers=False
            )
            store.check(["rung"])
            answered.set()

    thread = threading.Thread(target=connect, name="rung-connect", daemon=True)
    with silenced():
        thread.start()
        thread.join(_STORE_SECONDS)
    return answered.is_set()


def _listen_error(address: str, port: int = 0) -> str | None:
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
    """Data loaders pass batches through it, and NCCL data between GPUs without direct links. `room` is (size, free)."""
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
    """A rank has connections to all others, and its data loaders need more."""
    # The hard limit: each job raises its soft limit to it.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1] if limit is None else limit
    if hard == resource.RLIM_INFINITY:
        return ok("open files", "no limit")
    needed = needed_files(nproc * nnodes, nproc)
    if hard < needed:
        return failed("open files", f"limit {hard}, and {needed} are needed", f"ulimit -n {max(65536, needed)}")
    if hard < 1024:
        return warning("open files", f"limit {hard}", "ulimit -n 65536")
    return ok("open files", f"limit {hard:,}")


def locked_memory(limit: int | None = None, cards: list[str] | None = None) -> Finding:
    """InfiniBand and RoCE register memory, which locks it."""
    if cards is None:
        cards = [path.name for path in Path("/sys/class/infiniband").glob("*")]
    if not cards:
        return not_here("locked memory", "only InfiniBand and RoCE cards need it, and there is none")
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    if soft == resource.RLIM_INFINITY:
        return ok("locked memory", f"no limit; {', '.join(cards)}")
    found = f"limit {human_bytes(soft)}, with {', '.join(cards)}"
    return warning("locked memory", found, "ulimit -l unlimited (docker: --ulimit memlock=-1)")


def host_memory(nproc: int, free: int | None = None) -> Finding:
    free = free_host_bytes() if free is None else free
    if free is None:
        return not_here("host memory", "this system does not report its free memory")
    found = f"{human_bytes(free)} free for {nproc} rank{'s' * (nproc != 1)}"
    if free < nproc * _GIB // 2:
        return failed(
            "host memory", found, "end other programs, or use fewer processes: torch alone takes 300 MiB each"
        )
    if free < 2 * nproc * _GIB:
        return warning("host memory", found, "end other programs, or use fewer processes")
    return ok("host memory", found)


def run_directory(folder: Path, free: int | None = None) -> Finding:
    """Check that a run can write to its directory, and how much room is left."""
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
        return failed(check, f"cannot write in {above}: {error.strerror or error}", "choose another with --out DIR")
    left = shutil.disk_usage(above).free if free is None else free
    found = f"{human_bytes(left)} free in {folder}/, 4 MiB reached the disk after {human_seconds(seconds)}"
    if left < _GIB:
        return failed(check, found, "free space, or choose another disk with --out DIR: checkpoints need it")
    if left < 10 * _GIB:
        return warning(check, found, "free space for checkpoints, or keep fewer with --keep")
    return ok(check, found)


# -- computing -------------------------------------------------------------------------------------------------------


def threads(nproc: int, cores: int | None = None, limit: float | None = None) -> Finding:
    """More threads than cores wait for each other. Rung gives each rank its share unless OMP_NUM_THREADS is set."""
    cores = num_cores() if cores is None else cores
    limit = core_limit() if limit is None else limit
    usable = min(cores, limit) if limit is not None else cores
    requested = os.environ.get("OMP_NUM_THREADS", "")
    each = int(requested) if requested.isdigit() else max(1, cores // nproc)
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
    """Some CPUs lack bf16 or fp16 arithmetic and compute it hundreds of times slower than fp32."""
    check = "half precision"
    if ratios is None:
        if torch.cuda.is_available():
            return not_here(check, "training runs on GPUs; the CPU's speed does not matter")
        ratios = {"bf16": half_precision_ratio(torch.bfloat16), "fp16": half_precision_ratio(torch.float16)}
    found = "on the CPU a matrix product takes " + ", ".join(f"{r:.1f}x in {name}" for name, r in ratios.items())
    slow = [name for name, ratio in ratios.items() if ratio >= SLOW]
    if slow:
        return warning(check, f"{found} of the time in fp32", f"use --precision fp32 here, not {' or '.join(slow)}")
    return ok(check, f"{found} of the time in fp32")
