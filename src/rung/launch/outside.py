"""`rung train` in a process that is a rank already: mpirun, torchrun or srun has started one for each.

Nothing is launched then. The processes agree on the run's directory over a store; each trains, rank 0 with the console
beside it, and they watch each other in the launcher's stead. What only a launcher can do, to start ranks again or
change their number, is refused.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch
from rich.console import Console
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from rung.config import Resolved, RunConfig
from rung.environment import (
    Place,
    contradiction,
    describe,
    ignored_interfaces,
    outside_attempt,
    set_environment_world_key,
    store_address,
    use_interface,
)
from rung.errors import RESUME_EXIT_CODE, ConfigError, EnvironmentProblem, StrategyError
from rung.launch.console import JobConsole
from rung.launch.elastic import Terms, announce, retire
from rung.launch.failure import release_room, reserve_room
from rung.launch.peers import REPORTED, PeerWatch
from rung.launch.rank import flush, leave_when_asked, say_last_words, speak_into, wait_for_threads
from rung.launch.stacks import answer_with_stack
from rung.loop import Summary
from rung.mpi import library as mpi
from rung.network import address_among_others, interface_of
from rung.processes import machine_name, parent_has_terminal, share_of_cores
from rung.status import StatusBoard
from rung.store import open_store
from rung.strategy import Layout, default_name, parse
from rung.train import Job, worker
from rung.untrusted import printable

_GOODBYE_SECONDS = 10.0
_SIZE_FLAGS = {"mpirun": "mpirun -n", "torchrun": "torchrun --nproc-per-node", "srun": "srun --ntasks"}
# What only Rung's own launcher can do, and the value that asks for nothing of the kind.
_LAUNCHERS = {"nnodes": "1", "rdzv": None, "max_restarts": None}


# -- settings --------------------------------------------------------------------------------------------------------


def fit_to_place(resolved: Resolved, place: Place) -> Resolved:
    """Refuse what contradicts the place of this process. What an old run had of it is left behind."""
    if (words := contradiction(place)) is not None:
        raise ConfigError(words)
    config = resolved.config
    dropped: dict[str, Any] = {}
    for name, nothing in _LAUNCHERS.items():
        value = getattr(config, name)
        if value in (nothing, 0):
            continue
        if resolved.origins.get(name) != "run":
            raise ConfigError(
                f"--{name.replace('_', '-')} {value} is for Rung's own launcher. This job was started by "
                f"{place.launcher}, which decides how many processes there are, and where. Leave it out, or start "
                f"{_itself(place)}."
            )
        dropped[name] = nothing
    if config.nproc is not None and config.nproc != str(place.local_size):
        if resolved.origins.get("nproc") != "run":
            raise ConfigError(
                f"--nproc {config.nproc} and {place.launcher}'s {place.local_size} "
                f"process{'es' if place.local_size > 1 else ''} on this machine ({place.size} in all) contradict each "
                f"other. Leave --nproc out: {place.launcher} has started them."
            )
        dropped["nproc"] = None
    return replace(resolved, config=replace(config, **dropped))


def _itself(place: Place) -> str:
    if place.launcher != "srun":
        return "`rung train` by itself"
    return "one `rung train` on each machine, with srun --ntasks-per-node=1, --nproc N and --nnodes N"


def spread(config: RunConfig, place: Place) -> tuple[str, Layout, Terms]:
    """Strategy, layout and terms of a job of as many ranks as there are."""
    strategy = config.strategy or default_name(place.size)
    try:
        layout = parse(strategy, place.size, place.local_size, config.schedule, config.servers)
    except StrategyError as error:
        raise StrategyError(str(error).replace("--nproc", _SIZE_FLAGS[place.launcher])) from None
    return strategy, layout, Terms((place.local_size, place.local_size), grace_seconds=config.grace_seconds)


def refuse_over_mpi(config: RunConfig, layout: Layout) -> None:
    """What a strategy needs and MPI does not have."""
    if config.backend != "mpi":
        return
    if layout.uses_rpc:
        raise ConfigError(
            f"--backend mpi carries collectives, and {layout.name} sends its tensors as calls over RPC, which has a "
            "transport of its own. Leave --backend out; mpirun starts it as well."
        )
    if config.compress in ("fp16", "bf16"):
        raise ConfigError(
            f"--compress {config.compress} saves nothing over MPI, which adds up no 16-bit numbers: they would travel "
            "as fp32. Use another compression, or --backend gloo."
        )


def open_console(place: Place, file: TextIO) -> Console:
    """What rank 0 shows; the others show nothing."""
    is_fake = place.launcher == "mpirun" and not parent_has_terminal()
    return Console(file=file, quiet=not place.is_main, force_terminal=False if is_fake else None, markup=False)


# -- meeting the others ----------------------------------------------------------------------------------------------


class Gathering:
    """The ranks of the job before they train: what rank 0 decides is told to all."""

    def __init__(self, place: Place, backend: str, key: str) -> None:
        self.place = place
        # Slurm can have several on one system.
        self.machine = f"{machine_name()}-{place.node}" if place.node else machine_name()
        # Kept as long as the process lives: rank 0's is the one that all groups use.
        self._whole = open_store(place, over_mpi=backend == "mpi", key=key)
        set_environment_world_key(self._whole.key)
        describe(place, self._whole.host, self._whole.port)
        self._store: Store = PrefixStore(f"rung/{outside_attempt()}", self._whole)

    def from_main(self, key: str, decide: Callable[[], str]) -> str:
        """What rank 0 decides."""
        if self.place.is_main:
            self._store.set(key, decide())
        return bytes(self._store.get(key)).decode()

    def from_leader(self, key: str, prepare: Callable[[], None]) -> None:
        """Let the first rank of each machine prepare something for all of its ranks."""
        key = f"{key}/{self.machine}"
        if self.place.local_rank == 0:
            prepare()
            self._store.set(key, "done")
        self._store.wait([key])

    def part(self, last_words: Callable[[], None]) -> None:
        """Rank 0 says the last words before any process leaves: an exit code other than 0 is the end of all."""
        with contextlib.suppress(RuntimeError):  # whoever is gone already need not be waited for
            self._store.set_timeout(datetime.timedelta(seconds=_GOODBYE_SECONDS))
            if self.place.is_main:
                last_words()
                self._store.set("said", "1")
                deadline = time.monotonic() + _GOODBYE_SECONDS
                while self._store.add("heard", 0) < self.place.size - 1 and time.monotonic() < deadline:
                    time.sleep(0.01)
            else:
                self._store.wait(["said"])
                self._store.add("heard", 1)


# -- the rank itself -------------------------------------------------------------------------------------------------


def run_rank(job: Job, gathering: Gathering, terms: Terms, farewell: Callable[[Summary, Console], None]) -> NoReturn:
    """Train as the rank that this process is, and end it. `farewell` says on rank 0 how it went."""
    assert job.run_dir is not None
    place, folder = gathering.place, Path(job.run_dir)
    state = folder / ".state" if place.is_one_machine else folder / ".state" / gathering.machine
    gathering.from_leader("state", lambda: _make_state(state, folder, place, terms))
    board = StatusBoard(state / "status", place.size)
    status = board.writer(place.rank)
    status.phase("starting")
    reserve_room(state, place.rank)
    answer_with_stack(state, place.rank)
    terminal, errors = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(2), "w")
    speak_into(folder / "logs" / f"rank-{place.rank}.log", f"by {place.launcher}, {job.strategy}, {place.size} ranks")
    console = open_console(place, terminal)
    _use_machine(place, console)
    with contextlib.ExitStack() as shown:
        if place.is_main:
            view = shown.enter_context(JobConsole(folder, console))
            view.follow(board, range(place.size))

        def speak(text: str) -> None:
            shown.close()
            errors.write(f"{text}\n")
            errors.flush()

        def interrupt(*_: Any) -> NoReturn:
            if place.is_main:
                errors.write(f"interrupted in step {status.current().step}; what was written lies in {folder}\n")
                errors.flush()
            os._exit(130)

        leave_when_asked(status)
        signal.signal(signal.SIGINT, interrupt)
        peers = PeerWatch(place, board, state, folder / "logs", job.config.timeout, speak)
        peers.start()
        try:
            summary = worker(job, status)
            wait_for_threads()
        except BaseException as error:
            try:
                say_last_words(state, place.rank, board, error)
                peers.wait_for_report()
            finally:
                os._exit(1)
        peers.stop()
    release_room(state, place.rank)
    gathering.part(lambda: farewell(summary, console))
    if place.local_rank == 0:
        retire(state)
    mpi.finish()
    flush()
    # Not a normal exit: it waits without limit for threads and processes that the task may have left.
    os._exit(RESUME_EXIT_CODE if summary.stopped else 0)


def _make_state(state: Path, folder: Path, place: Place, terms: Terms) -> None:
    """The folder in which the ranks of a machine exchange what nobody else needs, without what an old job left."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    state.mkdir(parents=True, exist_ok=True)
    for old in [*state.glob("rank-*.json"), *state.glob("stack-*"), state / REPORTED]:
        old.unlink(missing_ok=True)
    StatusBoard(state / "status", place.size, create=True)
    announce(state, terms)


def _use_machine(place: Place, console: Console) -> None:
    # Do not depend on how the machine's name resolves: often to loopback, where no other machine is.
    with contextlib.suppress(EnvironmentProblem):
        address = "127.0.0.1" if place.is_one_machine else address_among_others(*store_address()[:2])[0]
        interface = interface_of(address)
        if (ignored := ignored_interfaces(interface)) is not None:
            console.print(printable(ignored), highlight=False, soft_wrap=True, markup=False)
        use_interface(interface)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(share_of_cores(place.local_size))
