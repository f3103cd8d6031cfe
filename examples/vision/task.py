"""torchvision's own ResNet-18 or vision transformer, with random weights, on handwritten digits.

    rung train examples/vision/task.py --strategy pp2 --nproc 2
    rung train examples/vision/task.py --strategy pp2,fsdp2 --nproc 4 --set model.kind=vit

Nothing is downloaded: the digits come with scikit-learn. The models are torchvision's classes as they are.
"""

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

try:
    import torchvision
except RuntimeError:  # a wheel made for CUDA beside a torch without: two operators for object detection are missing
    missing = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        missing.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision

defaults = {"batch_size": 32, "epochs": 2, "clip": 1.0}


def model(kind="resnet18", classes=10, size=32, patch=8, layers=4, width=96, heads=4):
    if kind == "resnet18":
        return torchvision.models.resnet18(num_classes=classes)
    if kind == "vit":
        return torchvision.models.VisionTransformer(
            image_size=size,
            patch_size=patch,
            num_layers=layers,
            num_heads=heads,
            hidden_dim=width,
            mlp_dim=4 * width,
            num_classes=classes,
        )
    raise ValueError(f"model.kind cannot be {kind!r}; it is resnet18 or vit")


def train_data(size=32):
    return digits(size, train=True)


def eval_data(size=32):
    return digits(size, train=False)


def loss(output, target, log):
    log("accuracy", (output.argmax(dim=1) == target).float().mean())
    return F.cross_entropy(output, target)


def metrics(output, target):
    return {"accuracy": (output.argmax(dim=1) == target).float()}


def optimizer(model, lr=1e-3, weight_decay=0.01):
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)


def on_evaluation(state, goal=1.0):
    if state.metrics["accuracy"] >= goal:
        state.stop(f"{state.metrics['accuracy']:.3f} of the held-out digits are right, {goal} was the goal")


def digits(size, train):
    """scikit-learn's digits, enlarged and in three equal channels. Every fifth is held out."""
    from sklearn.datasets import load_digits

    data = load_digits()
    pixels = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16 - 0.5
    labels = torch.tensor(data.target)
    held_out = torch.arange(len(labels)) % 5 == 0
    chosen = ~held_out if train else held_out
    images = F.interpolate(pixels[chosen], size=(size, size), mode="bilinear", align_corners=False)
    return TensorDataset(images.repeat(1, 3, 1, 1), labels[chosen])
