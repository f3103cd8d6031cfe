"""The kernel of the chunked loss against torch's own cross entropy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rung.parallel.chunked_loss import ChunkedLinear
from rung.parallel.softmax_kernel import softmax_gradient_

WIDTH, ROWS = 64, 1000
# For each case the number of classes, the type of the logits and options of the loss.
CASES: list[tuple[int, torch.dtype, dict[str, Any]]] = [
    (50304, torch.bfloat16, {}),
    (50257, torch.bfloat16, {"label_smoothing": 0.1}),
    (8192, torch.bfloat16, {"reduction": "none"}),
    (8193, torch.float32, {"weight": True}),
    (5, torch.float32, {"reduction": "sum"}),
    (128256, torch.bfloat16, {"ignore_index": 7}),
]


def loss_kernel() -> str:
    worst = 0.0
    for case in CASES:
        worst = max(worst, _largest_difference(*case))
    _infinities()
    return f"{len(CASES)} losses, relative difference of all gradients up to {worst:.1e}"


def _largest_difference(num_classes: int, dtype: torch.dtype, options: dict[str, Any]) -> float:
    torch.manual_seed(0)
    if options.pop("weight", False):
        options["weight"] = torch.rand(num_classes, device="cuda") + 0.5
    x = torch.randn(ROWS, WIDTH, device="cuda").to(dtype)
    target = torch.randint(num_classes, (ROWS,), device="cuda")
    target[::5] = options.get("ignore_index", -100)
    found = []
    for is_chunked in (False, True):
        torch.manual_seed(1)
        layer = torch.nn.Linear(WIDTH, num_classes, device="cuda", dtype=dtype)
        if is_chunked:
            layer.__class__ = ChunkedLinear
            layer.rows_per_chunk, layer.has_kernel = 300, True  # type: ignore[assignment]
        given = x.clone().requires_grad_()
        loss = F.cross_entropy(layer(given).float(), target, **options)
        (loss * torch.linspace(1, 2, ROWS, device="cuda")).sum().backward()
        found.append([loss.detach(), given.grad, layer.weight.grad, layer.bias.grad])
    # In bf16 torch rounds a sum over 1,000 rows once; the parts of three chunks are added in fp32 and rounded then.
    allowed = 1e-2 if dtype == torch.bfloat16 else 1e-5
    differences = [_difference(own, other) for own, other in zip(found[1], found[0], strict=True)]
    assert differences[0] < 1e-5 and max(differences) < allowed, (num_classes, dtype, options, differences)
    return max(differences)


def _difference(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None and expected is not None
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def _infinities() -> None:
    """A class that cannot be has -inf; nan and inf are not hidden."""
    logits = torch.randn(4, 20000, device="cuda")
    logits[0, :9000] = -torch.inf
    logits[1, 3], logits[2, 4] = torch.nan, torch.inf
    index, ones = torch.full((4,), 9500, device="cuda"), torch.ones(4, device="cuda")
    expected = torch.softmax(logits, 1)
    expected[:, 9500] -= 1
    log_sums, sums = torch.logsumexp(logits, 1), softmax_gradient_(logits, index, ones, 0.0)
    torch.testing.assert_close(logits[[0, 1, 3]], expected[[0, 1, 3]], equal_nan=True, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(sums[[0, 1, 3]], log_sums[[0, 1, 3]], equal_nan=True)
    assert logits[2].isnan().any() and not sums[2].isfinite()
