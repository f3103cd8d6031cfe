"""Jobs that mpirun starts: MPI's collectives one by one, strategies over them, and the command line as a rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from functools import reduce
from operator import mul
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rung.config import RunConfig
from rung.processes import is_running
from rung.strategy import parse
from rung.task import load_task
from rung.world import environment_size, open_world
from tests import mpi
from tests.matrix import BATCH_SIZE, GLOBAL_MICRO_BATCH
from tests.multi.test_commands import events, rung
from tests.parity import Outcome, by_hand, largest_difference, with_rung
from tests.tasks import TASKS

pytestmark = pytest.mark.skipif(not mpi.is_available(), reason="mpi4py or mpirun is not installed")

RUNG = [sys.executable, "-m", "rung.cli", "train"]
TASK = """
import os
import time
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

defaults = {"batch_size": 25, "steps": 5, "device": "cpu", "precision": "fp64", "log_every": 1}

def data(count):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(count, 8, generator=g)
    return TensorDataset(x, (x.sum(1) > 0).long())

class Net(nn.Module):
    def __init__(self, width, trouble):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.last = nn.Linear(width, 2)
        self.trouble, self.calls = trouble, 0

    def forward(self, x):
        self.calls += 1
        if self.trouble == "slow":
            time.sleep(0.2)
        elif self.trouble and self.calls > 2 and os.environ["RANK"] == "1":
            if self.trouble == "raise":
                raise ValueError("a planned mistake")
            os.kill(os.getpid(), 9) if self.trouble == "kill" else time.sleep(600)
        return self.last(self.frozen(self.norm(self.first(x)).relu()))

def model(width=12, trouble=""): return Net(width, trouble)
def train_data(): return data(103)
def eval_data(): return data(41)
def loss(output, target): return F.cross_entropy(output, target)
def metrics(output, target): return {"accuracy": (output.argmax(1) == target).float()}
def optimizer(model, lr=0.1): return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
"""


@pytest.fixture
def task(tmp_path: Path) -> Path:
    path = tmp_path / "mine" / "task.py"
    path.parent.mkdir()
    path.write_text(TASK)
    return path


def outcome_of(run: Path) -> Outcome:
    steps = events(run, "step")
    return Outcome(
        losses=[row["loss"] for row in steps],
        norms=[row["grad_norm"] for row in steps],
        rates=[row["lr"] for row in steps],
        state=load_file(run / "model.safetensors"),
        evaluation={key: events(run, "eval")[-1][key] for key in ("loss", "accuracy")},
    )


# -- collectives -----------------------------------------------------------------------------------------------------

DTYPES = {
    "float32": (torch.float32, ("SUM", "AVG", "PRODUCT", "MIN", "MAX")),
    "float64": (torch.float64, ("SUM", "AVG")),
    "float16": (torch.float16, ("SUM", "AVG", "MAX")),
    "bfloat16": (torch.bfloat16, ("SUM", "AVG", "MIN")),
    "int8": (torch.int8, ("SUM", "MIN", "BAND", "BOR", "BXOR")),
    "int64": (torch.int64, ("SUM", "PRODUCT", "MAX")),
    "uint8": (torch.uint8, ("SUM", "BXOR")),
    "bool": (torch.bool, ("SUM", "PRODUCT", "MAX", "MIN", "BOR", "BAND", "BXOR")),
    "complex64": (torch.complex64, ("SUM", "AVG")),
}
EXPECTED = {
    "SUM": lambda rows: rows.any(0) if rows.dtype is torch.bool else rows.sum(0).to(rows.dtype),
    "AVG": lambda rows: (rows.sum(0, dtype=torch.promote_types(rows.dtype, torch.float32)) / len(rows)).to(rows.dtype),
    "PRODUCT": lambda rows: reduce(torch.logical_and if rows.dtype is torch.bool else mul, rows),
    "MIN": lambda rows: reduce(torch.minimum, rows),
    "MAX": lambda rows: reduce(torch.maximum, rows),
    "BAND": lambda rows: reduce(torch.bitwise_and, rows),
    "BOR": lambda rows: reduce(torch.bitwise_or, rows),
    "BXOR": lambda rows: reduce(torch.bitwise_xor, rows),
}


def values(dtype: torch.dtype, rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Small whole numbers: exact in every type, in any order."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7 + 5 * rank) % 4 - int(dtype.is_signed)).to(dtype).view(shape)


def exercise(group: dist.ProcessGroup | None, ranks: list[int]) -> None:
    """Every collective among these ranks, against what it means."""
    rank, size = dist.get_rank(group), len(ranks)
    first, last = ranks[0], ranks[-1]
    for dtype, operations in DTYPES.values():
        for shape in ((), (5,), (3, 4), (0,)):
            rows = torch.stack([values(dtype, r, shape) for r in range(size)])
            for name in operations:
                op = getattr(dist.ReduceOp, name)
                wanted = EXPECTED[name](rows)
                own = rows[rank].clone()
                dist.all_reduce(own, op, group=group)
                assert torch.equal(own, wanted), (dtype, shape, name, own, wanted)
                own = rows[rank].clone()
                dist.reduce(own, last, op, group=group)
                assert torch.equal(own, wanted if dist.get_rank() == last else rows[rank]), (dtype, shape, name)
            own = rows[rank].clone()
            dist.broadcast(own, last, group=group)
            assert torch.equal(own, rows[-1])
            everyone = [torch.zeros_like(own) for _ in ranks]
            dist.all_gather(everyone, rows[rank].clone(), group=group)
            assert torch.equal(torch.stack(everyone), rows)
            places = [torch.zeros_like(own) for _ in ranks] if dist.get_rank() == first else None
            dist.gather(rows[rank].clone(), places, first, group=group)
            assert places is None or torch.equal(torch.stack(places), rows)
            dist.scatter(own, list(rows.clone()) if dist.get_rank() == last else None, last, group=group)
            assert torch.equal(own, rows[rank])
        # All ranks' parts for all ranks: [from, to, element]
        parts = torch.stack([values(dtype, r, (size, 6)) for r in range(size)])
        flat = torch.zeros(size * 6, dtype=dtype)
        dist.all_gather_into_tensor(flat, parts[rank, 0].clone(), group=group)
        assert torch.equal(flat.view(size, 6), parts[:, 0])
        dist.all_gather_into_tensor(flat, flat[rank * 6 : rank * 6 + 6], group=group)  # in place, as FSDP does
        assert torch.equal(flat.view(size, 6), parts[:, 0])
        for name in operations:
            op, own = getattr(dist.ReduceOp, name), torch.zeros(6, dtype=dtype)
            dist.reduce_scatter_tensor(own, parts[rank].clone(), op, group=group)
            assert torch.equal(own, EXPECTED[name](parts[:, rank])), (dtype, name)
            dist.reduce_scatter(own.zero_(), list(parts[rank].clone()), op, group=group)
            assert torch.equal(own, EXPECTED[name](parts[:, rank])), (dtype, name)
        dist.all_to_all_single(flat, parts[rank].reshape(-1).clone(), group=group)
        assert torch.equal(flat.view(size, 6), parts[:, rank])
        received = [torch.zeros(6, dtype=dtype) for _ in ranks]
        dist.all_to_all(received, list(parts[rank].clone()), group=group)
        assert torch.equal(torch.stack(received), parts[:, rank])
        own = parts[rank, 0].clone()
        if rank == 0:
            dist.send(own, last, group=group, tag=3)
        elif dist.get_rank() == last:
            assert dist.recv(own, first, group=group, tag=3) == first
            assert torch.equal(own, parts[0, 0])
    dist.barrier(group)


def exercise_odd_ones(rank: int, size: int) -> None:
    # Parts of different sizes, some of them empty.
    sizes = [[(source + 2 * target) % 3 for target in range(size)] for source in range(size)]
    sent = torch.cat([torch.full((n,), float(10 * rank + target)) for target, n in enumerate(sizes[rank])])
    theirs = [sizes[source][rank] for source in range(size)]
    received = torch.zeros(sum(theirs))
    dist.all_to_all_single(received, sent, theirs, sizes[rank])
    wanted = torch.cat([torch.full((n,), float(10 * source + rank)) for source, n in enumerate(theirs)])
    assert torch.equal(received, wanted)
    everyone = [torch.zeros(r) for r in range(size)]
    dist.all_gather(everyone, torch.full((rank,), float(rank)))
    assert all(torch.equal(got, torch.full((r,), float(r))) for r, got in enumerate(everyone))
    # Not contiguous, and one that remembers its history.
    whole = torch.zeros(4, 6)
    whole[:, ::2] = rank + 1.0
    dist.all_reduce(whole[:, ::2])
    assert torch.equal(whole[:, ::2], torch.full((4, 3), size * (size + 1) / 2)) and not whole[:, 1::2].any()
    weight = torch.nn.Parameter(torch.full((3,), float(rank)))
    dist.broadcast(weight, 1)
    assert torch.equal(weight.data, torch.ones(3))
    with torch.inference_mode():
        half = torch.full((3,), rank + 1.0, dtype=torch.bfloat16)
        dist.all_reduce(half, dist.ReduceOp.AVG)
        assert torch.equal(half, torch.full((3,), (size + 1) / 2, dtype=torch.bfloat16))
    # Many at once: they end in any order, and each has its own result.
    tensors = [torch.full((n + 1,), float(rank + n)) for n in range(40)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    assert torch.equal(works[7].get_future().wait()[0], tensors[7])
    for n, work in reversed(list(enumerate(works))):
        assert work.wait() and work.is_completed() and work.is_success()
        assert torch.equal(tensors[n], torch.full((n + 1,), size * (size - 1) / 2 + size * n))
    # Messages in both directions around a ring; those of one pair arrive in order.
    left, right = (rank - 1) % size, (rank + 1) % size
    inbox = [torch.zeros(2) for _ in range(3)]
    swaps = [dist.P2POp(dist.irecv, place, left) for place in inbox]
    swaps += [dist.P2POp(dist.isend, torch.full((2,), 10.0 * rank + n), right) for n in range(3)]
    for work in dist.batch_isend_irecv(swaps):
        work.wait()
    assert [place[0].item() for place in inbox] == [10.0 * left + n for n in range(3)]
    if rank:
        dist.send(torch.tensor([rank]), 0, tag=9)
    else:
        found = {}
        for _ in range(size - 1):
            number = torch.zeros(1, dtype=torch.int64)
            found[dist.recv(number, tag=9)] = number.item()
        assert found == {r: r for r in range(1, size)}
    told: list[Any] = [None] * size
    dist.all_gather_object(told, {"rank": rank})
    assert told == [{"rank": r} for r in range(size)]


def refusals() -> list[str]:
    """What MPI cannot do is said, by name."""
    asked = [
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), dist.ReduceOp.AVG),
        lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn)),
        lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND),
        lambda: dist.all_reduce(torch.ones(2).to_sparse()),
        lambda: dist.all_gather_into_tensor(torch.ones(9), torch.ones(2)),
    ]
    found = []
    for call in asked:
        with pytest.raises(RuntimeError) as error:
            call()
        found.append(str(error.value))
    return found


def exercise_all(strategies: list[str]) -> tuple[list[str], dict[str, Outcome]]:
    """On one rank: every collective among all and among some; then each of these strategies."""
    size = environment_size()
    with open_world(parse("ddp", size), device="cpu", backend="mpi", timeout_seconds=60) as world:
        exercise(None, list(range(size)))
        pairs = [[r for r in range(size) if r % 2 == odd] for odd in (0, 1)]
        groups = [dist.new_group(pair) for pair in pairs]
        exercise(groups[world.rank % 2], pairs[world.rank % 2])
        exercise_odd_ones(world.rank, size)
        said = refusals()
        # A call of MPI counts no further than 2^31: the same in parts, which are small ones here.
        from rung.mpi.group import MpiGroup

        whole, MpiGroup.MOST_ELEMENTS = MpiGroup.MOST_ELEMENTS, 5
        exercise(groups[world.rank % 2], pairs[world.rank % 2])
        MpiGroup.MOST_ELEMENTS = whole
        # A rank that does not come: an error after the timeout, and not for ever.
        lonely = dist.new_group(list(range(size)), timeout=timedelta(seconds=0.3))
        if world.is_main:
            with pytest.raises(RuntimeError, match=r"all_reduce on rank 0 of 4 .* timed out"):
                dist.all_reduce(torch.ones(1), group=lonely)
        world.barrier()
    return said, {strategy: with_rung(TASKS["gpt"], strategy, parity_config(strategy)) for strategy in strategies}


def parity_config(strategy: str) -> RunConfig:
    layout = parse(strategy, environment_size())
    micro = max(1, GLOBAL_MICRO_BATCH // layout.num_data_ranks)
    return RunConfig(
        batch_size=BATCH_SIZE, micro_batch=micro, steps=5, precision="fp64", clip=1.0, device="cpu", backend="mpi"
    )


def compare(outcomes: list[dict[str, Outcome]]) -> None:
    config = RunConfig(batch_size=BATCH_SIZE, steps=5, precision="fp64", clip=1.0)
    reference = by_hand(TASKS["gpt"](), config)
    for strategy in outcomes[0]:
        for found in outcomes:
            if found[strategy].state:
                assert largest_difference(reference, found[strategy]) < 1e-9, strategy


def test_collectives_and_strategies_on_four_ranks() -> None:
    """One start for all of it: most of the time goes into imports."""
    results = mpi.on_mpi_ranks(exercise_all, 4, ["zero3", "pp2,tp2"])
    said = results[0][0]
    for words, told in zip(
        ("AVG of torch.int32", "float8", "BAND of torch.float32", "dense", "9 elements"),
        said,
        strict=True,
    ):
        assert words in told
    compare([outcomes for _, outcomes in results])


def parity_rows(strategies: list[str]) -> dict[str, Outcome]:
    return {strategy: with_rung(TASKS["gpt"], strategy, parity_config(strategy)) for strategy in strategies}


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_strategies_over_mpi_match_one_process(size: int) -> None:
    compare(mpi.on_mpi_ranks(parity_rows, size, [strategy for strategy, ranks in mpi.ROWS if ranks == size]))


# -- the command line ------------------------------------------------------------------------------------------------


def test_ddp_by_mpirun_is_ddp_over_gloo_and_goes_on_anywhere(task: Path, tmp_path: Path) -> None:
    """Two ranks add up two numbers: the order is the same, and so is every bit."""
    runs = {}
    for backend in ("mpi", "gloo"):
        flags = ["--backend", backend, "--out", backend, "--checkpoint-every", "3"]
        output = mpi.mpirun(2, *RUNG, str(task), *flags, cwd=tmp_path)
        carried = "mpi4py" if backend == "mpi" else backend
        assert output.count(f"mine, ddp: 2 replicas on cpu ({carried})") == 1
        assert output.count("done: 5 steps") == 1 and "\x1b" not in output
        folder = tmp_path / backend
        assert sorted(path.name for path in (folder / "logs").iterdir()) == ["rank-0.log", "rank-1.log"]
        runs[backend] = outcome_of(folder)
    assert largest_difference(runs["mpi"], runs["gloo"]) == 0.0
    reference = by_hand(load_task(task), RunConfig(batch_size=25, steps=5))
    assert largest_difference(reference, runs["mpi"]) < 1e-9

    # The same run for three more steps: by mpirun over MPI, and by no launcher at all.
    resumed = mpi.mpirun(2, *RUNG, str(task), "--resume", "gloo", "--backend", "mpi", "--steps", "8", cwd=tmp_path)
    assert "going on after step 5" in resumed
    alone = rung("train", str(task), "--resume", "mpi", "--strategy", "single", "--steps", "8", cwd=tmp_path).stdout
    assert "going on after step 5" in alone and "saved under ddp on 2 processes" in alone
    reference = by_hand(load_task(task), RunConfig(batch_size=25, steps=8))
    for backend in ("mpi", "gloo"):
        assert largest_difference(reference, outcome_of(tmp_path / backend)) < 1e-9


def test_four_ranks_by_mpirun_match_one_process(task: Path, tmp_path: Path) -> None:
    mpi.mpirun(4, *RUNG, str(task), "--backend", "mpi", "--out", "run", "--micro-batch", "2", cwd=tmp_path)
    reference = by_hand(load_task(task), RunConfig(batch_size=25, steps=5), micro=8)
    assert largest_difference(reference, outcome_of(tmp_path / "run")) < 1e-9


def test_the_cause_of_a_failure_is_told_once_and_nobody_stays(task: Path, tmp_path: Path) -> None:
    flags = ["--backend", "mpi", "--out", "run", "--set", "model.trouble=raise"]
    output = mpi.mpirun(2, *RUNG, str(task), *flags, cwd=tmp_path, code=1)
    last = output.splitlines()[-24:]
    assert sum("rank 1 failed in step 3, phase forward: ValueError: a planned mistake" in line for line in last) == 1
    assert any("rank 0: stopped in step 3, phase forward, waits in" in line for line in last), output
    assert output.count("a planned mistake") == 3  # headline, source line, traceback's end
    assert nobody_runs(str(task))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["mpi", "gloo"])
def test_a_rank_that_is_killed_is_named(task: Path, tmp_path: Path, backend: str) -> None:
    flags = ["--backend", backend, "--out", "run", "--set", "model.trouble=kill"]
    output = mpi.mpirun(2, *RUNG, str(task), *flags, cwd=tmp_path, code=137)
    assert output.count("rank 1 is gone in step 3, phase forward: it was killed, or ended without a word.") == 1
    assert nobody_runs(str(task))


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(task: Path, tmp_path: Path) -> None:
    flags = ["--backend", "mpi", "--out", "run", "--timeout", "6", "--set", "model.trouble=sleep"]
    output = mpi.mpirun(2, *RUNG, str(task), *flags, cwd=tmp_path, code=1)
    assert "the job hangs in step 3: rank 1 is not there, rank 0 waits for it in all_gather" in output
    assert nobody_runs(str(task))


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["mpirun", "rank"])
def test_a_request_to_leave_saves_the_state(task: Path, tmp_path: Path, whom: str) -> None:
    """mpirun passes SIGUSR1 on. A scheduler may also signal the ranks themselves."""
    flags = ["--backend", "mpi", "--out", "run", "--steps", "50", "--set", "model.trouble=slow"]
    process = mpi.start(2, *RUNG, str(task), *flags, cwd=tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and '"event": "step"' in metrics.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    if whom == "mpirun":
        process.send_signal(signal.SIGUSR1)
    else:
        ranks = [pid for pid in processes_of(str(task)) if pid != process.pid]
        os.kill(ranks[-1], signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    assert output.count("after a checkpoint; go on with: rung train") == 1
    resumed = mpi.mpirun(2, *RUNG, str(task), "--resume", "run", "--steps", "12", cwd=tmp_path)
    assert "going on after step" in resumed and "done: 12 steps" in resumed


@pytest.mark.slow
def test_torchrun_starts_ranks_as_well(task: Path, tmp_path: Path) -> None:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*start, "-m", "rung.cli", "train", str(task), "--out", "run"],
        cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("done: 5 steps") == 1
    reference = by_hand(load_task(task), RunConfig(batch_size=25, steps=5))
    assert largest_difference(reference, outcome_of(tmp_path / "run")) < 1e-9


@pytest.mark.slow
def test_a_script_of_ones_own_by_mpirun(tmp_path: Path) -> None:
    """`open_session` finds its place, and one failing rank does not leave the others waiting."""
    script = tmp_path / "loop.py"
    script.write_text(
        "import sys, torch, rung\n"
        f"with rung.open_session({str(tmp_path / 'task.py')!r}, strategy='ddp', backend=sys.argv[1]) as session:\n"
        "    for window in session.batches():\n"
        "        stats = session.step(window)\n"
        "        if sys.argv[2] == 'fail' and session.world.rank == 1: raise KeyError('planned')\n"
        "    print('loss', float(stats.loss), flush=True)\n"
    )
    (tmp_path / "task.py").write_text(TASK)
    for backend in ("mpi", "gloo"):
        output = mpi.mpirun(2, sys.executable, str(script), backend, "finish", cwd=tmp_path)
        assert len({line for line in output.splitlines() if line.startswith("loss")}) == 1
    assert "planned" in mpi.mpirun(2, sys.executable, str(script), "mpi", "fail", cwd=tmp_path, code=1)


def processes_of(word: str) -> list[int]:
    """Processes of this machine with a word in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if word in words and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return sorted(found)


def nobody_runs(word: str) -> bool:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if not any(is_running(pid) for pid in processes_of(word)):
            return True
        time.sleep(0.1)
    return False
