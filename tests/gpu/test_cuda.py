"""Every strategy on a CUDA device: the rows of `tests.gpu.rows`, one test each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.gpu.rows import rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(("name", "check"), rows(), ids=lambda value: value if isinstance(value, str) else "")
def test_on_cuda(name: str, check: Callable[[], str]) -> None:
    check()
