"""Tensor parallelism on real ranks: five steps in float64 must be those of one process."""

from __future__ import annotations

import collections
import copy
import dataclasses
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from rung.distributed import fake_world
from rung.errors import ModelError
from rung.parallel.tensor.apply import (
    apply_sequence_parallel,
    apply_tensor_plan,
    loss_context,
    reduce_partial_gradients,
    whole_output,
)
from rung.parallel.tensor.plan import TensorPlan, make_plan
from rung.parallel.tensor.survey import Survey
from rung.parallel.tensor.vocab_parallel_loss import VocabularyLoss
from tests.harness import on_ranks
from tests.marks import slow
from tests.tensor_models import CASES, Decoder

STEPS = 5


def plan_of(model: nn.Module, inputs: Tensor, num_ranks: int, **options: Any) -> TensorPlan:
    mode = fake_world.new_fake_mode()
    with fake_world.fake_tensors(mode):
        fake = torch.empty(inputs.shape, dtype=inputs.dtype)
    survey = Survey(model, num_ranks, lambda: model(fake), torch.device("cpu"), mode, options.pop("blocks", None))
    return make_plan(survey, **options)


def batches(case: str) -> list[tuple[Tensor, Tensor]]:
    """Some targets are ignored, and in a number that differs from step to step."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(STEPS):
        inputs = CASES[case].inputs(generator)
        shape = inputs.shape[:1] if case in ("mlp", "cnn", "leaking backward") else inputs.shape[:2]
        target = torch.randint(CASES[case].num_classes, shape, generator=generator)
        target[torch.rand(target.shape, generator=generator) < 0.2] = -100
        found.append((inputs, target))
    return found


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten(), ignore_index=-100)


def summed_loss(output: Tensor, target: Tensor) -> Tensor:
    """For several pieces of one batch: a sum does not depend on the pieces."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="sum") / 20


def build(case: str) -> nn.Module:
    torch.manual_seed(0)
    return CASES[case].make().double()


def train(
    model: nn.Module, case: str, plan: TensorPlan | None, *, part: slice = slice(None), loss_of: Any = mean_loss
) -> dict[str, Any]:
    """Losses, the gradients of the last step, the parameters and an output in evaluation, all whole."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9, foreach=False)
    losses = []
    for inputs, target in batches(case):
        optimizer.zero_grad()
        output = model(inputs[part])
        with loss_context(plan):
            loss = loss_of(output, target[part])
        assert type(loss) is Tensor
        loss.backward()
        reduce_partial_gradients(trained)
        optimizer.step()
        losses.append(loss.item())
    gradients = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    parameters = {n: whole(p) for n, p in model.named_parameters()}
    model.eval()
    with torch.no_grad():
        output = whole_output(model(batches(case)[0][0][part]))
    return {"losses": losses, "gradients": gradients, "parameters": parameters, "output": output}


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    assert set(ours["gradients"]) == set(theirs["gradients"])
    found = [abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True)]
    found += [(ours["output"] - theirs["output"]).abs().max().item()]
    for kind in ("gradients", "parameters"):
        found += [(ours[kind][n] - theirs[kind][n]).abs().max().item() for n in theirs[kind]]
    return max(found)


def spread(model: nn.Module, plan: TensorPlan, mesh: DeviceMesh, dp_mesh: DeviceMesh | None = None) -> None:
    """Block by block and then the rest, as a model is built."""
    for name, blocks in model.named_children():
        if isinstance(blocks, nn.ModuleList):
            for key, block in blocks.named_children():
                apply_tensor_plan(block, f"{name}.{key}", plan, mesh)
                if dp_mesh is not None:
                    fully_shard(block, mesh=dp_mesh)
    apply_tensor_plan(model, "", plan, mesh)
    if plan.sequence_blocks:
        apply_sequence_parallel([(n, model.get_submodule(n)) for n in plan.sequence_blocks], plan, mesh)
    if dp_mesh is not None:
        fully_shard(model, mesh=dp_mesh)


def bytes_kept(model: nn.Module) -> int:
    found = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return sum(t.untyped_storage().nbytes() for t in found)


def check(rows: list[tuple[str, dict[str, Any]]]) -> list[tuple[float, TensorPlan, int]]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    for case, options in rows:
        model = build(case)
        theirs = train(copy.deepcopy(model), case, None)
        plan = plan_of(model, batches(case)[0][0], dist.get_world_size(), **options)
        names = [(n, p.requires_grad) for n, p in model.named_parameters()]
        next(model.parameters()).mark = "kept"  # type: ignore[attr-defined]
        spread(model, plan, mesh)
        assert [(n, p.requires_grad) for n, p in model.named_parameters()] == names
        assert next(model.parameters()).mark == "kept"  # type: ignore[attr-defined]
        found.append((difference(train(model, case, plan), theirs), plan, bytes_kept(model)))
    return found


ROWS: dict[str, tuple[str, dict[str, Any]]] = {case: (case, {}) for case in CASES}
ROWS |= {
    "tiny gpt, whole loss": ("tiny gpt", {"vocabulary_loss": False}),
    "pre-norm, sequence": ("pre-norm", {"sequence_parallel": True}),
    "pre-norm, sequence, whole loss": ("pre-norm", {"sequence_parallel": True, "vocabulary_loss": False}),
    "gated, sequence": ("gated", {"sequence_parallel": True}),
    "tiny gpt, task's plan": ("tiny gpt", {"given": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}}),
}


# Where four ranks differ from two: sizes that do not come out even, heads that cannot be dealt out.
ON_FOUR = ["mlp", "tiny gpt", "six heads", "grouped", "normed heads", "conv1d", "cnn", "tiny gpt, whole loss"]
ON_FOUR += ["pre-norm, sequence"]


@pytest.fixture(scope="module", params=[2, slow(4)])
def results(request: pytest.FixtureRequest) -> tuple[int, list[dict[str, tuple[float, TensorPlan, int]]]]:
    names = list(ROWS) if request.param == 2 else ON_FOUR
    every_rank = on_ranks(check, request.param, [ROWS[name] for name in names], timeout=240)
    return request.param, [dict(zip(names, found, strict=True)) for found in every_rank]


def test_five_steps_are_those_of_one_process(results: Any) -> None:
    _, ranks = results
    assert {row: found for rank in ranks for row, (found, _, _) in rank.items() if not found < 1e-10} == {}


def test_all_ranks_make_the_same_plan(results: Any) -> None:
    _, ranks = results
    for row in ranks[0]:
        assert all(found[row][1] == ranks[0][row][1] for found in ranks)


def test_a_rank_keeps_its_part_and_no_more(results: Any) -> None:
    """Storage is counted, so that a view of the whole would show."""
    num_ranks, ranks = results
    plan = ranks[0]["tiny gpt"][1]
    expected = [0] * num_ranks
    for name, parameter in build("tiny gpt").named_parameters():
        word = plan.styles.get(name.rpartition(".")[0])
        dim = 1 if word == "rowwise" else 0
        is_cut = word is not None and parameter.dim() > dim
        sizes = [len(c) for c in torch.arange(parameter.shape[dim]).chunk(num_ranks)] if is_cut else [1] * num_ranks
        for rank, size in enumerate(sizes):
            expected[rank] += 8 * parameter.numel() * size // (parameter.shape[dim] if is_cut else 1)
    assert [found["tiny gpt"][2] for found in ranks] == expected


def test_sequence_parallelism_is_on_where_it_is_tested(results: Any) -> None:
    _, ranks = results
    plan = ranks[0]["pre-norm, sequence"][1]
    assert plan.sequence_blocks == ("blocks.0", "blocks.1", "blocks.2")
    assert plan.gathers["blocks.1.attention"] == ("hidden",)
    assert plan.gathers["blocks.1.mlp"] == (0,)
    assert plan.styles["blocks.1.attention.query_norm"] == plan.styles["blocks.1.mlp_norm"] == "summed"
    if "gated, sequence" in ranks[0]:
        assert ranks[0]["gated, sequence"][1].gathers["blocks.0.gate"] == (0,)


def check_with_sharding(rows: list[tuple[str, dict[str, Any]]]) -> list[float]:
    warnings.filterwarnings("ignore", message=".*_StridedShard.*")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for case, options in rows:
        model = build(case)
        theirs = train(copy.deepcopy(model), case, None, loss_of=summed_loss)
        plan = plan_of(model, batches(case)[0][0], 2, **options)
        spread(model, plan, mesh["tp"], mesh["dp"])
        rank = mesh["dp"].get_local_rank()
        half = slice(0, 2) if rank == 0 else slice(2, None)  # pieces of unlike sizes
        ours = train(model, case, plan, part=half, loss_of=lambda o, t: 2 * summed_loss(o, t))
        halves = torch.tensor(ours.pop("losses"), dtype=torch.float64)
        dist.all_reduce(halves, group=mesh["dp"].get_group())
        ours |= {"losses": (halves / 2).tolist(), "output": theirs["output"][half] - ours.pop("output")}
        theirs["output"] = torch.zeros_like(ours["output"])
        found.append(difference(ours, theirs))
    return found


def test_tensor_parallel_and_fully_shard_are_one_process() -> None:
    rows = [ROWS[row] for row in ("tiny gpt", "normed heads", "frozen", "pre-norm, sequence", "conv1d")]
    for found in on_ranks(check_with_sharding, 4, rows):
        assert max(found) < 1e-10


def losses_on_a_cut_output() -> list[float]:
    """Each way of using logits of 23 classes, against the same on whole ones: the loss and its gradient."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(23, (3, 5), generator=generator)
    target[0, 2:] = -100
    weights = torch.rand(23, generator=generator, dtype=torch.float64)
    ways: list[Any] = [
        lambda x: F.cross_entropy(x.flatten(0, 1), target.flatten()),
        lambda x: F.cross_entropy(x.view(-1, x.size(-1)), target.view(-1), reduction="sum"),
        lambda x: F.cross_entropy(x.transpose(1, 2), target, reduction="none").square().mean(),
        lambda x: nn.CrossEntropyLoss(ignore_index=1)(x[0, :2], target[0, :2]),
        lambda x: F.cross_entropy(x[:, :-1].reshape(-1, 23), target[:, 1:].flatten()),
        lambda x: F.cross_entropy(x.float().flatten(0, 1), target.flatten()),
        lambda x: F.cross_entropy(x.flatten(0, 1) * 1e3, target.flatten()),
        # These need the whole, and get it.
        lambda x: F.cross_entropy(x.flatten(0, 1), target.flatten(), weight=weights, label_smoothing=0.1),
        lambda x: F.cross_entropy(x.flatten(0, 1), x.flatten(0, 1).softmax(-1).detach()),
        lambda x: F.cross_entropy(x[target != -100], target[target != -100]) + 0.1 * x.logsumexp(-1).square().mean(),
        lambda x: F.nll_loss(F.log_softmax(x, dim=-1)[0, :2], target[0, :2]),
        lambda x: (x - weights).square().mean() + x[..., 3].sum() + x.unflatten(-1, (1, 23)).amax(),
    ]
    found = []
    values = torch.randn(3, 5, 23, generator=generator, dtype=torch.float64)
    for way in ways:
        reference = values.clone().requires_grad_()
        expected = way(reference)
        expected.backward()
        cut = distribute_tensor(values, mesh, [Shard(2)], src_data_rank=None).requires_grad_()
        with VocabularyLoss():
            loss = way(cut)
        assert type(loss) is Tensor
        loss.backward()
        assert reference.grad is not None
        gap = whole(cut.grad).sub(reference.grad).abs().max() / reference.grad.abs().max()
        found.append(max(gap.item(), (loss - expected).abs().item()))
    with VocabularyLoss(), pytest.raises(RuntimeError, match=r"not in \[0, 23\)"):
        F.cross_entropy(cut[0], torch.full((5,), 23))
    return found


@pytest.mark.parametrize("num_ranks", [2, slow(4)])
def test_any_loss_may_be_taken_of_a_cut_output(num_ranks: int) -> None:
    for found in on_ranks(losses_on_a_cut_output, num_ranks):
        in_float32 = found.pop(5)
        assert max(found) < 1e-10
        assert in_float32 < 1e-6


class Listening(TorchDispatchMode):
    """Counts collectives, those of DTensor (functional ones) included."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # what it does comes by here again, on plain tensors
        if "c10d" in func.namespace:
            self.heard[func._opname] += 1
        return func(*args, **(kwargs or {}))


def collectives_of_a_step(rows: list[str]) -> list[dict[str, int]]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for case, options in (ROWS[row] for row in rows):
        model = build(case)
        inputs, target = batches(case)[0]
        plan = plan_of(model, inputs, 2, **options)
        spread(model, plan, mesh)
        for listening in (Listening(), Listening()):  # the second adds to gradients
            with listening:
                output = model(inputs)
                with loss_context(plan):
                    mean_loss(output, target).backward()
        with listening:
            reduce_partial_gradients(list(model.parameters()))
        found.append(dict(listening.heard))
    return found


def test_a_step_sends_what_it_must_and_no_more() -> None:
    """Each pair one sum forward and one backward, whatever it has of layers; nothing for weights."""
    pairs, embedding, head = 2, 1, 3  # of a step's all-reduces: the head has two in the loss, and one backward
    mlp, decoder, sequence = on_ranks(collectives_of_a_step, 2, ["mlp", "decoder", "pre-norm, sequence"])[0]
    assert mlp == {"allreduce_": 2, "_allgather_base_": 1}  # its input has no gradient
    assert decoder == {"allreduce_": 2 * pairs * 2 + embedding + head}
    # Sums become scatters, and every scatter has a gather; the norms and biases are summed at once.
    scatters = 3 * pairs * 2
    gathers = scatters + 2  # and at the ends of the run
    assert sequence == {
        "allreduce_": embedding + head + 1,
        "_allgather_base_": gathers,
        "_reduce_scatter_base_": scatters,
    }


@dataclasses.dataclass
class Record:
    logits: Any
    name: str = "kept"


Named = collections.namedtuple("Named", "first second")


def details() -> None:
    """Ties, nested outputs, an index out of range, a sequence that cannot be cut: on two ranks."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    model = build("pre-norm")
    plan = plan_of(model, batches("pre-norm")[0][0], 2, sequence_parallel=True)
    spread(model, plan, mesh)
    assert model.head.weight is model.token.weight
    apply_tensor_plan(model, "", plan, mesh)  # nothing is cut twice
    output = model(torch.zeros(1, 8, dtype=torch.long))
    assert isinstance(output, DTensor) and output.to_local().shape == (1, 8, 12 if dist.get_rank() == 0 else 11)
    nested = whole_output({"a": [output, 3], "b": (Record(output), Named(output, None)), "c": torch.ones(2)})
    found = [nested["a"][0], nested["b"][0].logits, nested["b"][1].first]
    assert all(type(t) is Tensor and t.shape == (1, 8, 23) for t in found)
    assert nested["b"][0].name == "kept" and nested["a"][1] == 3
    found[1].sum().backward()
    with pytest.raises(RuntimeError, match=r"not in \[0, 23\)"):
        model(torch.full((1, 8), 23))
    with pytest.raises(ModelError, match="cannot split a sequence of 7 among 2 ranks"):
        model(torch.zeros(1, 7, dtype=torch.long))


def test_details_on_two_ranks() -> None:
    on_ranks(details, 2)


def in_a_fake_world() -> tuple[list[torch.Size], torch.Size]:
    """Rank 21 of 64, eight of which share each tensor; eight groups shard what is left."""
    warnings.filterwarnings("ignore", message=".*_StridedShard.*")
    fake_world.open_fake_group(21, 64)
    mesh = init_device_mesh("cpu", (8, 8), mesh_dim_names=("dp", "tp"))
    tp, dp = mesh["tp"], mesh["dp"]
    mode = fake_world.new_fake_mode()
    with fake_world.fake_tensors(mode), fake_world.real_meshes():
        torch.manual_seed(0)
        model = Decoder(32, 16, width=64, hidden=100, norms=True)
        tokens = torch.zeros(2, 16, dtype=torch.long)
        plan = make_plan(Survey(model, 8, lambda: model(tokens), torch.device("cpu"), mode, None))
        spread(model, plan, tp, dp)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            output = model(tokens)
            with loss_context(plan):
                loss = mean_loss(output, tokens)
            loss.backward()
            reduce_partial_gradients(list(model.parameters()))
            optimizer.step()
        parts = [model.get_parameter(n) for n in ("blocks.0.0.query.weight", "blocks.0.1.down.weight", "head.weight")]
        return [p.to_local().shape for p in parts], loss.shape


def test_a_fake_world_of_64_ranks() -> None:
    (shapes, loss), *_ = on_ranks(in_a_fake_world, 1)
    # Cut by 8 along rows, columns and rows, then by 8 along rows: 64 by 64, 64 by 100 (in parts of 13), 23 by 64.
    assert shapes == [torch.Size([1, 64]), torch.Size([8, 13]), torch.Size([1, 64])]
    assert loss == torch.Size([])
