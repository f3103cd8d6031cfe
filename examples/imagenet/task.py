"""Image classification as ImageNet has it: any architecture of torchvision or timm, a directory of images or none.

    rung train examples/imagenet/task.py --strategy ddp --nproc 2                 # generated images, a minute or two
    rung train examples/imagenet/task.py --config examples/imagenet/resnet50.toml \\
        --set train_data.root=DIR --set eval_data.root=DIR                        # DIR/train and DIR/val

Images travel as bytes and are normalised on the device, which is a quarter of the memory and of the way to a GPU.
"""

import difflib
import math
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import Dataset

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's channels
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm")

defaults = {"batch_size": 32, "epochs": 2, "keep_best": "top1:max"}


def model(arch="resnet18", classes=10, size=0):
    """`timm/NAME` is of timm, any other name of torchvision. `size` is for those made for one size of images."""
    if arch.startswith("timm/"):
        timm, name = import_timm(), arch.removeprefix("timm/")
        refuse_unknown(name, timm.list_models(), "timm")
        return timm.create_model(name, num_classes=classes, **({"img_size": size} if size else {}))
    models = import_torchvision().models
    refuse_unknown(arch, models.list_models(module=models), "torchvision")
    if size and not arch.startswith("vit"):
        raise ValueError(f"{arch} takes images of any size: leave model.size out, and set train_data.size")
    more = {"image_size": size} if size else {}
    if arch in ("googlenet", "inception_v3"):
        more |= {"aux_logits": False, "init_weights": True}  # one output, as all others have
    return models.get_model(arch, weights=None, num_classes=classes, **more)


def train_data(root="", size=32, classes=10, count=1024, augment=True):
    if size < 1 or classes < 1 or count < 1:
        raise ValueError("train_data.size, train_data.classes and train_data.count are at least 1")
    if root:
        return image_folder(root, "train", size, classes, augment)
    return Patterns(size, classes, count, augment, first=0)


def eval_data(root="", size=32, classes=10, count=256):
    if root:
        return image_folder(root, "val", size, classes, augment=False)
    return Patterns(size, classes, count, augment=False, first=2**31)


def forward(model, batch):
    images, _ = batch
    images = images.to(torch.get_default_dtype()) / 255
    return model((images - by_channel(MEAN, images)) / by_channel(DEVIATION, images))


def loss(output, target, smoothing=0.1):
    return F.cross_entropy(output, target, label_smoothing=smoothing)


def metrics(output, target):
    best = output.topk(min(5, output.shape[1]), dim=1).indices
    hits = best == target[:, None]
    return {"top1": hits[:, 0].float(), "top5": hits.any(dim=1).float()}


def optimizer(model, kind="sgd", lr=0.05, momentum=0.9, weight_decay=5e-5):
    """No weight decay for biases and the parameters of norms: these have one dimension."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=momentum > 0)
    if kind == "adamw":
        return torch.optim.AdamW(groups, lr=lr)
    raise ValueError(f"optimizer.kind cannot be {kind!r}; it is sgd or adamw")


def schedule(optimizer, total_steps, warmup=0.1):
    """Up along a line for the `warmup` part of all steps, then down to nothing along a cosine."""
    rising = max(1, round(warmup * total_steps))

    def factor(step):
        if step < rising:
            return (step + 1) / rising
        return (1 + math.cos(math.pi * (step - rising) / max(1, total_steps - rising))) / 2

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


# -- images ------------------------------------------------------------------------------------------------------------


class Patterns(Dataset):
    """Images that cost next to nothing and can be learnt: of each class a pattern of colours, elsewhere in every image
    and under noise."""

    def __init__(self, size, classes, count, augment, first):
        own = torch.Generator().manual_seed(0)
        room = size + max(1, size // 4)
        coarse = torch.rand(classes, 3, 5, 5, generator=own)
        patterns = F.interpolate(coarse, size=(room, room), mode="bilinear", align_corners=False)
        self.patterns = (patterns * 96).to(torch.uint8)
        self.noise = torch.randint(160, (64, 3, size, size), dtype=torch.uint8, generator=own)
        self.size, self.count, self.augment, self.first = size, count, augment, first
        self.places = room - size + 1

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        label = index % len(self.patterns)
        if self.augment:
            top, left = torch.randint(self.places, (2,)).tolist()
        else:
            top, left = divmod((index + self.first) * 7919 % self.places**2, self.places)
        pattern = self.patterns[label, :, top : top + self.size, left : left + self.size]
        image = pattern + self.noise[(index + self.first) * 104729 % 1009 % len(self.noise)]
        return (image.flip(2) if self.augment and torch.rand(()) < 0.5 else image), label


def image_folder(root, part, size, classes, augment):
    """A directory with a subdirectory of images for each class: `root`/`part`, or `root` itself."""
    torchvision = import_torchvision()
    is_parted = Path(root, "train").is_dir() or Path(root, "val").is_dir()
    folder = Path(root, part) if is_parted else Path(root)
    if not folder.is_dir():
        raise ValueError(f"there is no directory {folder}; {root} should hold train/ and val/, one directory a class")
    names = classes_of(folder)
    if not names:
        raise ValueError(f"{folder} has no subdirectories; each class of images should have one")
    if len(names) > classes:
        told = " ".join(f"--set {function}.classes={len(names)}" for function in ("model", "train_data", "eval_data"))
        raise ValueError(f"{folder} has {len(names)} classes, and the task is set to {classes}: {told}")
    others = classes_of(Path(root, "train"))
    if part == "val" and others and names != others:
        odd = sorted(set(names) ^ set(others))[0]
        raise ValueError(f"{folder} and {Path(root, 'train')} have different classes ({odd}): labels would not agree")
    transforms = torchvision.transforms
    if augment:
        steps = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    else:
        steps = [transforms.Resize(round(size * 256 / 224)), transforms.CenterCrop(size)]
    transform = transforms.Compose([*steps, transforms.PILToTensor()])
    return torchvision.datasets.ImageFolder(str(folder), transform, is_valid_file=is_image)


def classes_of(folder):
    return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def is_image(path):
    return path.lower().endswith(IMAGES)


def by_channel(values, images):
    """One number a channel, made on the device: a copy from the host would wait for it in every step."""
    return torch.cat([images.new_full((1, 1, 1), value) for value in values])


# -- packages that are wanted only when they are used ------------------------------------------------------------------

OPERATORS = []  # kept for as long as the process lives


def import_torchvision():
    try:
        import torchvision
    except ModuleNotFoundError:
        raise ImportError("this task needs torchvision: pip install 'rung[models]'") from None
    except RuntimeError:  # a wheel made for CUDA beside a torch without: two operators for object detection are missing
        missing = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            missing.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        OPERATORS.append(missing)
        import torchvision
    return torchvision


def import_timm():
    import_torchvision()  # which timm imports, too
    try:
        import timm
    except ModuleNotFoundError:
        raise ImportError("architectures named timm/... need timm: pip install timm") from None
    return timm


def refuse_unknown(name, known, package):
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"; near it: {', '.join(near)}" if near else f"; it has {len(known)}, such as {', '.join(known[:3])}"
        raise ValueError(f"{package} has no architecture {name!r}{hint}")
