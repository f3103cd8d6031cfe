"""Lets libraries be imported that import torchvision, beside a torch that torchvision was not built for."""

from __future__ import annotations

import torch


def declare_torchvision_operators() -> None:
    """Import torchvision, if it is installed; where its own operators did not load, declare them without code.

    A wheel made for CUDA beside a torch without lacks two operators for object detection, and fails on import. Both
    transformers and Lightning (by way of torchmetrics) import it where it is installed. No case needs the operators.
    """
    try:
        import torchvision
    except ImportError:
        return
    except RuntimeError:
        missing = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            missing.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision  # noqa: F401
