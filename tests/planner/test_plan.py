"""`rung plan`: what a dry run tells is what a real run does, and the advice follows from it."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from rung.cli.main import main
from rung.distributed.cuda_emulation import workspaces_of
from rung.distributed.status_board import StatusWriter
from rung.distributed.world import open_world
from rung.errors import ConfigError, ModelError
from rung.hardware.cluster import devices, links, parse_cluster
from rung.parallel.blocks import find_list_of_blocks
from rung.planner import auto, calibrate
from rung.planner import plan as plan_module
from rung.planner.candidates import layouts_for, named_layout
from rung.planner.cost import StepTime, duration, group_of, step_time
from rung.planner.dryrun import DryRun, dry_run, take_two_steps
from rung.planner.estimate import Estimate, Estimator, Memory
from rung.planner.kernels import measure_kernels
from rung.planner.memory import MIB, CachingAllocator, find_peak
from rung.planner.parallel_search import TaskSource
from rung.planner.plan import choose, make_plan
from rung.planner.search import cannot_win, least_state
from rung.planner.trace import Alloc, Mark, Work
from rung.planner.truncated_model import count_blocks, shortened
from rung.runtime import build_runtime
from rung.spec.abilities import rung_of
from rung.spec.config import RunConfig
from rung.spec.strategy import Layout, parse
from rung.spec.task import Task, load_task
from rung.train.worker import make_batches
from tests.marks import slow
from tests.tasks import EXAMPLES, TinyGPT, image_task, text_task


def real_run(task: Task, config: RunConfig) -> DryRun:
    """One process for real, read by the same tracer."""
    config = replace(config, steps=2, eval_every="never")
    with open_world(Layout("single"), device="cpu") as world:
        status = StatusWriter()
        batches = make_batches(task, config, world)
        runtime = build_runtime(task, world, config, total_steps=2, status=status)
        return take_two_steps(runtime, world, status, batches)


# -- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("make", [text_task, image_task])
def test_a_dry_run_takes_the_memory_of_a_real_one(make: Any, checkpointing: str) -> None:
    """To the byte, kind by kind."""
    config = RunConfig(batch_size=6, micro_batch=3, device="cpu", clip=1.0, activation_checkpointing=checkpointing)
    real, dry = real_run(make(), config), dry_run(make(), Layout("single"), config)
    assert find_peak(dry.trace).num_bytes == find_peak(real.trace).num_bytes
    assert find_peak(dry.trace).by_kind == find_peak(real.trace).by_kind
    assert dry.state_bytes == real.state_bytes
    # (In the update, kernels over many tensors at once are taken apart where tensors hold no data.)
    steps = [[e for e in run.trace.events[run.second_step :] if isinstance(e, Work)] for run in (dry, real)]
    rows = [[work.name for work in works if work.phase != "update"] for works in steps]
    assert rows[0] == rows[1]
    assert sum(work.flops for work in steps[0]) == sum(work.flops for work in steps[1]) > 0


def test_state_bytes_are_exact() -> None:
    """AdamW: two numbers a parameter and its step; cut in as many parts as the layout says."""
    task = text_task(model=lambda: TinyGPT(layers=2), optimizer=lambda model: torch.optim.AdamW(model.parameters()))
    config = RunConfig(batch_size=8, device="cpu")
    count = sum(p.numel() for p in task.model().parameters())
    whole = dry_run(task, Layout("single"), config)
    kinds = find_peak(whole.trace).by_kind
    assert kinds["parameters"] == whole.state_bytes["parameters"] == 4 * count
    assert whole.state_bytes["optimizer"] == 8 * count + 4 * len(list(task.model().parameters()))
    cut = dry_run(task, parse("zero3", 4), config)
    assert cut.state_bytes["parameters"] * 4 == pytest.approx(4 * count, rel=0.1)


def test_the_allocator_keeps_segments_and_cuts_pieces() -> None:
    allocator = CachingAllocator()
    first = allocator.take(3 * MIB)
    assert allocator.reserved == 20 * MIB, "a segment for pieces of less than 10 MiB"
    second = allocator.take(5 * MIB)
    assert allocator.reserved == 20 * MIB
    assert first is not None and second is not None
    allocator.give_back(first)
    allocator.give_back(second)
    allocator.take(19 * MIB)
    assert allocator.reserved == 20 * MIB, "free neighbours have grown together"
    allocator.take(30 * MIB + 1)
    assert allocator.reserved == 52 * MIB, "large ones get what they need, in steps of 2 MiB"
    allocator.take(100)
    allocator.take(100, stream=1)
    assert allocator.reserved == 56 * MIB, "small ones have segments of 2 MiB, and each stream has its own"


def test_a_pipeline_holds_no_memory_for_what_others_keep() -> None:
    task = text_task(model=lambda: TinyGPT(layers=4, width=32))
    config = RunConfig(batch_size=6, micro_batch=1, device="cpu")
    whole = find_peak(dry_run(task, Layout("single"), config).trace).by_kind["parameters"]
    parts = [find_peak(dry_run(task, parse("pp4", 4), config, rank=rank).trace).by_kind for rank in range(4)]
    assert all(part["parameters"] < 0.6 * whole for part in parts)
    # One forward, one backward: the first stage holds the activations of most micro-batches.
    assert parts[0]["activations"] > 2 * parts[2]["activations"]


# -- what CUDA would do --------------------------------------------------------------------------------------------


def test_an_emulated_gpu_computes_as_cuda_does() -> None:
    """Attention in a flash kernel; norms in full precision, where the CPU's autocast leaves them."""
    config = RunConfig(batch_size=4, precision="bf16", device="cpu")
    task = text_task()
    found = {}
    for device in ("cpu", "cuda"):
        works = dry_run(task, parse("fsdp", 2), config, device=device).trace.works()
        found[device] = {(work.name, work.dtype) for work in works}
    assert ("native_layer_norm", "float32") in found["cuda"]
    names = {device: {name for name, _ in works} for device, works in found.items()}
    assert "_scaled_dot_product_flash_attention" in names["cuda"]
    assert "_scaled_dot_product_flash_attention_for_cpu" in names["cpu"]
    assert "_scaled_dot_product_flash_attention" not in names["cpu"], "only while a GPU is emulated"


def test_workspaces_are_those_that_a_gpu_was_seen_to_take() -> None:
    """Sizes from the allocator's history on an H200: attention of 8 x 12 heads in bf16, 4,096 rows of an embedding."""
    heads = torch.empty(8, 12, 1024, 64, dtype=torch.bfloat16, device="meta")
    flash = "aten::_scaled_dot_product_flash_attention_backward"
    assert workspaces_of(flash, [heads] * 4, [heads] * 3) == [25559296]
    tokens, table = torch.empty(4, 1024, dtype=torch.long, device="meta"), torch.empty(50304, 768, device="meta")
    assert workspaces_of("aten::embedding_dense_backward", [heads, tokens], [table]) == [13839360]
    assert workspaces_of("aten::embedding_dense_backward", [heads, tokens[0]], [table]) == []
    assert workspaces_of("aten::mm", [table, table], [table]) == []
    windows = torch.empty(3136, 2, 16, 8, dtype=torch.bfloat16, device="meta")
    efficient = "aten::_scaled_dot_product_efficient_attention_backward"
    assert workspaces_of(efficient, [windows] * 4, [windows] * 3)[1] == 102860800, "tiles of 64 x 64 for 16 x 8 values"


def test_gradients_are_added_up_in_place_as_without_a_tracer() -> None:
    """A block's input has two gradients, of the block and of the way around it. Their sum takes no memory."""
    found = dry_run(text_task(), Layout("single"), RunConfig(batch_size=4, device="cpu"), device="cuda")
    works = [e for e in found.trace.events[found.second_step :] if isinstance(e, Work) and e.phase == "backward"]
    sums = [work for work in works if work.name == "add_"]
    assert len(sums) >= 2 * 2  # around attention and MLP of two blocks


def test_what_building_takes_comes_before_the_steps() -> None:
    """DDP has its buckets when it is made, and a sharded parameter was whole before."""
    config = RunConfig(batch_size=4, device="cpu")
    for strategy in ("ddp", "zero3"):
        found = dry_run(text_task(), parse(strategy, 2), config, device="cuda")
        first = next(i for i, e in enumerate(found.trace.events) if isinstance(e, Mark) and e.what == "step")
        taken = sum(e.allocation.num_bytes for e in found.trace.events[:first] if isinstance(e, Alloc))
        assert taken >= found.state_bytes["parameters"] * (2 if strategy == "ddp" else 3) * 0.95


# -- fewer blocks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "ranks"), [slow("single", 1), ("fsdp", 8), slow("pp2,ddp2", 4)])
def test_what_is_added_up_from_few_blocks_agrees_with_the_whole(strategy: str, ranks: int) -> None:
    task = text_task(model=lambda: TinyGPT(layers=8, width=64))
    config = RunConfig(batch_size=4 * max(1, ranks // 2) if "pp" in strategy else 4 * ranks, device="cpu", clip=1.0)
    cluster = parse_cluster(f"{max(2, ranks)}xH100")
    assert count_blocks(task) == 8
    layout = parse(strategy, ranks)
    short = Estimator(task, config, cluster, 8).estimate(layout, "none", 1)
    whole = Estimator(task, config, cluster, 0).estimate(layout, "none", 1)
    assert short.num_micro_batches == whole.num_micro_batches > 3
    assert short.memory.state == whole.memory.state
    assert short.memory.allocated == pytest.approx(whole.memory.allocated, rel=0.02)
    assert short.time.seconds == pytest.approx(whole.time.seconds, rel=0.03)


class EncoderDecoder(nn.Module):
    """Two lists of blocks, of which the decoder's is a little larger."""

    def __init__(self, layers: int = 8, width: int = 32) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"nhead": 2, "dim_feedforward": 2 * width, "dropout": 0.0, "batch_first": True}
        self.tokens, self.head = nn.Embedding(23, width), nn.Linear(width, 23)
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(width, **sizes) for _ in range(layers))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(width, **sizes) for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        read = written = self.tokens(tokens)
        for block in self.encoder:
            read = block(read)
        for block in self.decoder:
            written = block(written, read)
        out: torch.Tensor = self.head(written)
        return out


def test_with_fewer_blocks_the_same_list_is_recomputed() -> None:
    """Cut short, the decoder is the smaller list: the encoder must not take its place."""
    task, cluster = text_task(model=EncoderDecoder), parse_cluster("1xH100")
    config = RunConfig(batch_size=64, device="cpu", activation_checkpointing="full")
    assert count_blocks(task) == 8
    short, whole = (
        Estimator(task, config, cluster, blocks).estimate(parse("single", 1), "full", 64).memory for blocks in (8, 0)
    )
    assert short.allocated == whole.allocated


def test_a_list_whose_name_looks_like_a_pattern_is_cut_short() -> None:
    class Named(TinyGPT):
        def __init__(self) -> None:
            super().__init__(layers=5)
            self.parts = nn.ModuleDict({"h[0]": self.blocks})
            del self.blocks

    short = shortened(text_task(model=Named), 2)
    assert [name for name, _ in find_list_of_blocks(short.model(), short.blocks)] == ["parts.h[0].0", "parts.h[0].1"]


def test_blocks_that_differ_are_left_alone() -> None:
    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4)])

    assert count_blocks(text_task(model=Uneven)) == 0
    assert len(shortened(text_task(model=lambda: TinyGPT(layers=5)), 2).model().blocks) == 2


# -- hardware and time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nodes", "per_node", "name", "between"),
    [
        ("8xH100", 1, 8, "H100", None),
        ("h200", 1, 1, "H200", None),
        ("64 nodes x 8 H200, nvlink, 400Gb/s", 64, 8, "H200", 50e9),
        ("2x8xA100, ethernet", 2, 8, "A100", 1.25e9),
        ("4 nodes x 4 L40S, pcie4, 25Gb/s", 4, 4, "L40S", 3.125e9),
    ],
)
def test_clusters(text: str, nodes: int, per_node: int, name: str, between: float | None) -> None:
    cluster = parse_cluster(text)
    assert (cluster.nodes, cluster.per_node, cluster.device.name) == (nodes, per_node, name)
    assert (cluster.between.bandwidth if cluster.between else None) == between
    assert cluster.device.source


@pytest.mark.parametrize("text", ["8xH1000", "eight H100", "8xH100, warp", "0xH100", "2x8xH100, pcie4, 1Gb/s, 2Gb/s"])
def test_clusters_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--cluster"):
        parse_cluster(text)


def test_a_record_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(
        '[devices.mine]\nlike = "H100"\nsource = "my desk"\nmemory = 1000\n'
        '[links.wire]\nlike = "ethernet"\nlatency = 1.0\n'
    )
    assert devices(file)["mine"].memory == 1000
    assert devices(file)["mine"].bandwidth == devices()["H100"].bandwidth
    assert links(file)["wire"].latency == 1.0
    file.write_text('[devices.mine]\nlike = "H100"\nmemroy = 1\n')
    with pytest.raises(ConfigError, match="Did you mean 'memory'"):
        devices(file)


def test_groups_are_those_of_the_mesh() -> None:
    layout = parse("pp2,hsdp2x2,tp2", 16)
    for axis, ranks in (
        ("tp", (8, 9)),
        ("dp_shard", (8, 10)),
        ("dp_replicate", (8, 12)),
        ("data", (8, 10, 12, 14)),
        ("pp", (0, 8)),
        ("all", tuple(range(16))),
    ):
        assert group_of(axis, layout, 8) == ranks


def test_slow_links_take_time_and_stages_wait_for_each_other() -> None:
    task, config = text_task(), RunConfig(batch_size=16, micro_batch=1, device="cpu")
    runs = [dry_run(task, parse("ddp", 2), config, device="cuda")]
    quick, slow = (step_time(runs, parse_cluster(f"2xH100, {link}")) for link in ("nvlink4", "1Mb/s"))
    assert slow.seconds > 3 * quick.seconds
    assert slow.limit == "communication"
    stages = [dry_run(task, parse("pp2", 2), config, rank=rank, device="cuda") for rank in range(2)]
    piped = step_time(stages, parse_cluster("2xH100"))
    assert piped.pipeline > 0
    assert piped.seconds >= piped.arithmetic + piped.memory


# -- the choice ----------------------------------------------------------------------------------------------------


def row(strategy: str, ranks: int, seconds: float) -> Estimate:
    memory = Memory(1, 1, 1, {}, {"parameters": 1}, 0)
    return Estimate(parse(strategy, ranks), "none", 1, 1, memory, StepTime(seconds, seconds, 0, 0, 0, 0))


def test_a_lower_rung_is_preferred_unless_the_gain_is_worth_it() -> None:
    assert choose([row("fsdp", 4, 0.96), row("ddp", 4, 1.0)]).layout.name == "ddp"  # type: ignore[union-attr]
    assert choose([row("fsdp", 4, 0.9), row("ddp", 4, 1.0)]).layout.zero == 3  # type: ignore[union-attr]
    assert choose([row("ddp", 4, 0.97), row("single", 1, 1.0)]).layout.name == "single"  # type: ignore[union-attr]
    assert choose([]) is None


def test_layouts_that_cannot_win_are_not_looked_at() -> None:
    def why_not(strategy: str, *rows: Estimate, least: float = 0.0) -> str | None:
        return cannot_win(parse(strategy, 8), list(rows), min(r.time.seconds for r in rows), least)

    best, two, four = row("zero3", 8, 1.0), row("pp2,fsdp4", 8, 1.1), row("pp4,fsdp2", 8, 1.2)
    assert why_not("fsdp4,tp2", best, least=1.5) == "computing alone takes 1.5 s; the best takes 1 s"
    filling = "computing and the filling of its stages alone takes 1.5 s; the best takes 1 s"
    assert why_not("pp2,fsdp2,tp2", best, least=1.5) == filling
    assert why_not("fsdp4,tp2", best, least=1.04) is None
    assert why_not("ddp", best, least=1.5) is None  # the lower rungs are always looked at
    assert why_not("pp4,fsdp2", best, two) == "pp2,fsdp4 is slower than zero3 already"
    assert why_not("pp8", best, row("pp4,ddp2", 8, 1.3)) == "pp4,ddp2 takes 1.3 s; the best takes 1 s"
    assert why_not("pp4,zero1x2", best, two, four) is None  # of another kind
    told = "pp4,fsdp2, with the same stages, takes 1.6 s; the best takes 1 s"
    assert why_not("pp4,zero1x2", best, two, row("pp4,fsdp2", 8, 1.6)) == told
    short = replace(row("pp4,fsdp2", 8, 1.6), num_micro_batches=64)  # of memory: another sharding may have more of it
    assert why_not("pp4,zero1x2", best, two, short) is None


def test_no_step_takes_less_than_is_said() -> None:
    """What leaves layouts out unseen is held against those that were seen."""
    task = text_task(model=lambda: TinyGPT(layers=2))
    cluster = parse_cluster("8xH100")
    estimator = Estimator(task, RunConfig(batch_size=8, precision="bf16"), cluster, 0)
    for name in ("ddp", "fsdp4,tp2"):
        assert estimator.least_seconds(named_layout(name, cluster)) == 0.0  # nothing is known yet
        estimator.estimate(named_layout(name, cluster), "none", 4)
    for name in ("zero3", "pp2,ddp4", "pp2:gpipe,fsdp2,tp2"):
        layout = named_layout(name, cluster)
        least, found = estimator.least_seconds(layout), estimator.estimate(layout, "none", 1)
        assert 0 < least <= found.time.seconds * 1.01


def test_rungs_are_in_order() -> None:
    names = [("single", 1), ("ddp", 8), ("zero1", 8), ("zero2", 8), ("zero3", 8), ("hsdp2x4", 8), ("pp2,fsdp2,tp2", 8)]
    heights = [rung_of(parse(name, ranks)) for name, ranks in names]
    assert heights == sorted(heights)


def test_least_state_follows_what_is_cut() -> None:
    state = {"parameters": 800, "gradients": 800, "optimizer": 1600}
    found = {
        name: least_state(parse(name, 8), state) for name in ("ddp", "zero1", "zero2", "zero3", "tp8", "pp2,fsdp4")
    }
    assert found == {"ddp": 3200, "zero1": 1800, "zero2": 1100, "zero3": 400, "tp8": 400, "pp2,fsdp4": 400}


def test_layouts_use_all_devices_and_cut_tensors_inside_a_machine() -> None:
    found = list(layouts_for(parse_cluster("2 nodes x 4 H100"), 8, batch_size=32))
    assert {layout.num_ranks for layout in found} == {1, 8}
    assert max(layout.tp for layout in found) == 4
    assert {"ddp", "zero3", "hsdp2x4", "fsdp4,tp2", "pp2,fsdp2,tp2", "pp8"} <= {layout.name for layout in found}
    assert len({layout.name for layout in found}) == len(found)
    assert all(layout.cp == 1 for layout in found), "there are samples for all"
    few = {layout.name for layout in layouts_for(parse_cluster("2 nodes x 4 H100"), 8, batch_size=4)}
    assert {"ddp4,cp2", "fsdp2,cp4"} <= few and not any("cp8" in name for name in few)


def small_plan(cluster: str, model: Any, batch_size: int = 4, **changes: Any) -> Any:
    task = text_task(model=model)
    config = RunConfig(batch_size=batch_size, device="cpu", **changes)
    return make_plan(task, config, parse_cluster(cluster), advises=False)


def test_a_small_model_is_told_one_device() -> None:
    plan = small_plan("2xH100, ethernet", TinyGPT, batch_size=2)
    assert plan.chosen.layout.name == "single"
    assert plan.words[0].startswith("one device is enough")
    assert {"single", "ddp", "zero3", "tp2", "pp2"} <= {row.layout.name for row in plan.rows}


def test_what_cannot_fit_is_said_with_the_least_that_would(tmp_path: Path) -> None:
    own = tmp_path / "small.toml"
    own.write_text('[devices.tiny]\nlike = "H100"\nsource = "test"\nmemory = 1_000_000\n')
    task = text_task(model=lambda: TinyGPT(layers=2, width=64))
    plan = make_plan(task, RunConfig(batch_size=2, device="cpu"), parse_cluster("2xtiny", own), only="ddp")
    assert plan.chosen is None
    assert plan.words[0].startswith("nothing fits")
    assert "The least is" in plan.words[1]
    assert plan.rejected and all(one.reason for one in plan.rejected)
    json.dumps(plan.as_json())


# -- the command ---------------------------------------------------------------------------------------------------

SMALL = [
    "--set", "model.layers=2", "--set", "model.width=32", "--set", "model.heads=2", "--set", "model.context=8",
    "--set", "train_data.context=8", "--set", "train_data.characters=5000", "--batch-size", "2",
]  # fmt: skip


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(EXAMPLES / "gpt"), "--cluster", "2xH200", "--precision", "bf16", *SMALL]) == 0
    text = capsys.readouterr().out
    for word in (
        "2 x H200 (140 GiB)",
        "single",
        "ddp",
        "zero3",
        "pp2",
        "tp2",
        "samples/s",
        "rung train TASK --strategy",
    ):
        assert word in text
    assert main(["plan", str(EXAMPLES / "gpt"), "--cluster", "2xH200", "--strategy", "ddp", "--json", *SMALL]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["strategy"] for one in found["layouts"]] == ["ddp"]
    assert found["layouts"][0]["memory"]["allocated"] <= found["layouts"][0]["memory"]["reserved"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--cluster", "2xH100", "--strategy", "fdsp"], "there is no strategy 'fdsp'"),
        (["--cluster", "2xH100", "--strategy", "ps"], "ps cannot be planned or explained"),
        (["--cluster", "2xH100", "--strategy", "ddp4"], "'ddp4' needs 4 devices, but the cluster has 2"),
        (["--clustr", "2xH100"], "--cluster"),
        ([], "--cluster is required"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    with contextlib.suppress(SystemExit):
        assert main(["plan", str(EXAMPLES / "gpt"), *flags]) == 2
    assert words in capsys.readouterr().err


def test_a_named_layout_may_be_any_composition() -> None:
    cluster = parse_cluster("8xH100")
    assert named_layout("fsdp,tp2", cluster).name == "fsdp4,tp2"
    assert named_layout("pp2", cluster).num_ranks == 2
    assert named_layout("fsdp", cluster).num_ranks == 8


def test_a_model_that_looks_at_values_is_refused() -> None:
    class Looks(TinyGPT):
        def forward(self, tokens: Any) -> Any:
            output = super().forward(tokens)
            return output if float(output.sum()) > 0 else -output

    with pytest.raises(ModelError, match=r"test_plan.py:\d+: return output if float(?s:.*)reads tensor values"):
        dry_run(text_task(model=Looks), Layout("single"), RunConfig(batch_size=2, device="cpu"))


def test_auto_takes_the_advice_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "local_cluster", lambda nproc, on_gpu, log: parse_cluster(f"{nproc}xH100, ethernet"))
    said: list[str] = []
    assignments = dict(word.split("=") for word in SMALL if "=" in word)
    flags: dict[str, Any] = {"strategy": "auto", "nproc": "2", "batch_size": 2, "steps": 3}
    found = auto.choose_flags(EXAMPLES / "gpt", config_file=None, flags=flags, assignments=assignments, log=said.append)
    assert found == {**flags, "strategy": "single", "nproc": "1"}
    assert len(said) == 3
    assert "one device is enough" in said[1]
    for changes in ({"nproc": "2:4"}, {"nnodes": "2"}):
        with pytest.raises(ConfigError, match="one machine"):
            auto.choose_flags(
                EXAMPLES / "gpt", config_file=None, flags={**flags, **changes}, assignments={}, log=said.append
            )


def test_what_calibrate_writes_is_a_cluster(tmp_path: Path) -> None:
    abilities = {
        n: calibrate.Abilities(
            {"fp32": [(1e3, 1e9 / n), (1e9, 5e10 / n)]},
            [(1e3, 1e9), (1e9, 1e10)],
            {"gelu": [(1e3, 1e8)]},
            calibrate.HostTimes(1e-5),
        )
        for n in (1, 2)
    }
    file = tmp_path / "here.toml"
    times = {"all_reduce:2": [(1024.0, 1e-4), (2.0**20, 1e-3)]}
    file.write_text(calibrate._record("cpu", abilities, times, {2: 1e-3}))
    cluster = parse_cluster("2xhere", file)
    assert cluster.device_for(2).product_rate("fp32", 1e12) == pytest.approx(2.5e10)
    assert cluster.device_for(1).product_rate("fp32", 1e12) == pytest.approx(5e10)
    assert cluster.device.kind == "cpu" and not cluster.device.overlaps
    assert cluster.inside.times["all_reduce", 2][0] == (1024.0, 1e-4)
    with pytest.raises(ConfigError, match="the number of processes"):
        parse_cluster("here", file)
    assert cluster.inside.besides == {2: 1e-3}
    gelu = Work("gelu", "forward", 0, 1000, "float32", (), ())
    assert duration(gelu, cluster.device_for(2)) == (pytest.approx(1e-5), "memory")


def test_kernels_are_measured_by_what_the_tracer_says_of_them() -> None:
    with open_world(parse("single", 1), device="cpu", timeout_seconds=30) as world:
        found = measure_kernels(world, lambda call: 1.0)
    assert {"gelu", "gelu_backward", "convolution", "convolution_backward", "native_layer_norm"} <= set(found)
    # With a second for each call the rate is the amount: attention by its arithmetic, gelu by its bytes.
    attention = found["_scaled_dot_product_flash_attention_for_cpu"]
    assert [amount for amount, _ in attention] == [2 * 2 * 16 * length**2 * 64 for length in (32, 128, 512)]
    assert found["gelu"] == [(rows * 256 * 4 * 2, rows * 256 * 4 * 2) for rows in (16, 256, 4096)]
    # Drawing a mask takes longer than all else in dropout, and is an operation of its own here.
    assert len(found["bernoulli_"]) == 3
    # The running statistics of 16 channels are read and the batch's written: four vectors beside the image.
    assert found["batch_norm_update_stats"][0][0] == (8 * 16 * 8 * 8 + 4 * 16) * 4


def test_several_processes_find_what_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    path, assignments = EXAMPLES / "gpt", dict(word.split("=") for word in SMALL if "=" in word)
    config, cluster = RunConfig(batch_size=2, device="cpu"), parse_cluster("2xH100, ethernet")
    task = load_task(path).bind(assignments)
    alone = make_plan(task, config, cluster, advises=False)
    monkeypatch.setattr(plan_module, "FEW", 1)
    together = make_plan(task, config, cluster, advises=False, source=TaskSource(path, assignments))
    assert [row.layout.name for row in together.rows] == [row.layout.name for row in alone.rows]
    assert [row.time.seconds for row in together.rows] == pytest.approx([row.time.seconds for row in alone.rows])
    assert together.words == alone.words


def test_integers_have_values_in_a_dry_run_and_models_decide_by_them() -> None:
    """A mask that hides nothing is left out, as transformers does it; one that hides something is not."""

    class Masked(TinyGPT):
        table = torch.arange(3)

        def forward(self, tokens: Any) -> Any:
            places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            hides = (tokens < 0) | (places.diff(prepend=places[:, :1] - 1) != 1)
            output = super().forward(tokens)
            if bool(hides.any()):
                return output.asinh()
            counted = torch.zeros_like(places)
            counted += tokens
            self.table.add_(1)  # a real tensor, which torch writes to
            hidden = torch.ones_like(places)
            hidden[:, 1:] = (output.sum(-1) > 0).long()[:, 1:]  # unknown, and so is the whole
            try:
                bool(hidden.all())
            except Exception:
                return output.atan() if bool((counted == tokens).all()) else output.erf()
            raise AssertionError("values were known that cannot be")

    def names(hidden: int) -> set[str]:
        task = text_task(model=Masked)
        data = task.train_data()
        tokens, *others = data.tensors
        tokens = tokens.clone()
        tokens[:, 3] = hidden if hidden else tokens[:, 3]
        changed = replace(task, train_data=lambda: TensorDataset(tokens, *others))
        run = dry_run(changed, Layout("single"), RunConfig(batch_size=2, device="cpu"), device="cuda")
        return {work.name for work in run.trace.works()} & {"asinh", "atan", "erf"}

    assert names(0) == {"atan"}
    assert Masked.table.tolist() == [2, 3, 4], "once in each of two steps"
    assert names(-1) == {"asinh"}


def test_the_host_takes_its_time_for_operations_modules_and_updates() -> None:
    run = dry_run(text_task(model=lambda: TinyGPT(layers=1)), Layout("single"), RunConfig(batch_size=2, device="cpu"))
    works = [event for event in run.trace.events[run.second_step :] if isinstance(event, Work)]
    updates = [work for work in works if work.phase == "update"]
    calls = sum(work.calls for work in works)
    assert 0 < len(updates) < len(works) and calls >= 8
    cluster = parse_cluster("1xH100")
    times = {"issue": 1e-3, "issue_large": 2e-3, "issue_in_update": 3e-3, "call": 1e-2, "begin": 0.5}
    slow = replace(cluster, device=replace(cluster.device, **times))
    large = [work for work in works if work.is_large]
    assert {"native_layer_norm", "mm"} <= {work.name for work in large} and not {"add", "gelu"} & {
        w.name for w in large
    }
    expected = 0.5 + 1e-3 * (len(works) - len(updates)) + 1e-3 * len(large) + 3e-3 * len(updates) + 1e-2 * calls
    assert step_time([run], slow).seconds == pytest.approx(expected, rel=0.01)


def test_products_by_groups_and_attention_with_shared_keys_are_counted() -> None:
    """As many operations as the plain products that they stand for."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(16, 32)
            self.experts = nn.Parameter(torch.zeros(2, 32, 16))

        def forward(self, tokens: Any) -> Any:
            hidden = self.words(tokens)
            few = hidden.unflatten(-1, (4, 8)).transpose(1, 2)
            shared = few[:, :2]
            attended = nn.functional.scaled_dot_product_attention(few, shared, shared, enable_gqa=True)
            rows = (hidden + attended.transpose(1, 2).flatten(2)).flatten(0, 1)
            ends = torch.tensor([len(rows) // 2, len(rows)], dtype=torch.int32, device=rows.device)
            return nn.functional.grouped_mm(rows, self.experts, offs=ends).unflatten(0, tokens.shape)

    config = RunConfig(batch_size=2, device="cpu", precision="bf16")
    run = dry_run(text_task(model=Experts), Layout("single"), config, device="cuda")
    works = [event for event in run.trace.events[run.second_step :] if isinstance(event, Work)]
    flops = {(work.name, work.phase): work.flops for work in works if work.flops}
    length = text_task().train_data()[0][0].numel()
    assert flops["_grouped_mm", "forward"] == 2 * 2 * length * 32 * 16
    assert flops["_scaled_dot_product_flash_attention", "forward"] == 4 * 2 * 4 * length**2 * 8


def test_float8_is_planned_where_the_device_has_it() -> None:
    task = text_task(model=lambda: TinyGPT(64, 128, 2, 16))
    config = RunConfig(batch_size=8, device="cpu")
    quick = parse_cluster("1xH200")

    def products(precision: str) -> set[str]:
        run = dry_run(task, parse("single", 1), replace(config, precision=precision), device="cuda")
        return {work.dtype for work in run.trace.works() if work.name == "_scaled_mm"}

    assert products("fp8") == {"float8_e4m3fn", "float8_e5m2"} and not products("bf16")
    assert quick.device.product_rate("fp8", 1e12) > 1.2 * quick.device.product_rate("bf16", 1e12)
    assert make_plan(task, replace(config, precision="fp8"), quick, only="single").rows
    with pytest.raises(ConfigError, match="the record of A100 has no rate for it"):
        make_plan(task, replace(config, precision="fp8"), parse_cluster("1xA100"), only="single")


def test_the_host_takes_time_for_messages() -> None:
    task = text_task(model=lambda: TinyGPT(64, 128, 2, 16))
    run = dry_run(task, parse("zero3", 4), RunConfig(batch_size=8, device="cpu"), device="cuda")
    cluster = parse_cluster("4xH200")

    def seconds(gather: float) -> float:
        return step_time([run], replace(cluster, device=replace(cluster.device, send=0.0, gather=gather))).seconds

    sent = run.trace.messages(run.second_step)
    gathered = [message for message in sent if message.operation in ("all-gather", "reduce-scatter")]
    assert len(gathered) >= 6
    assert seconds(1.0) - seconds(0.0) == pytest.approx(len(gathered), abs=0.1)
