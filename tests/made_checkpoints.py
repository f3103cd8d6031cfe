"""Small checkpoints written by hand, and ways to spoil them."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rung.checkpoint.files import Entry, dtype_name, write_tensors
from rung.checkpoint.manifest import MANIFEST, folder_of, write_manifest


def make_checkpoint(checkpoints: Path, step: int, *, seed: int = 0) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint of two ranks: a matrix cut by rows, a tied vector and a counter."""
    g = torch.Generator().manual_seed(seed + step)
    whole = {
        "model/body.weight": torch.randn(7, 5, generator=g),
        "model/head.weight": torch.randn(5, generator=g, dtype=torch.float64),
        "model/count": torch.tensor(step),
        "model/table": torch.randn(3, generator=g),
    }
    folder = folder_of(checkpoints, step)
    folder.mkdir(parents=True)
    body = whole["model/body.weight"]
    cut = {
        0: {"model/head.weight": ([0], whole["model/head.weight"]), "model/body.weight@0,0": ([0, 0], body[:4])},
        1: {"model/count": ([], whole["model/count"]), "model/body.weight@4,0": ([4, 0], body[4:]),
            "model/table": ([0], whole["model/table"])},
    }  # fmt: skip
    tensors: dict[str, Any] = {}
    files: dict[str, Any] = {}
    for rank, parts in cut.items():
        file = f"rank-{rank:05d}.safetensors"
        entries = [Entry(key, value.dtype, tuple(value.shape)) for key, (_, value) in parts.items()]
        size, digest = write_tensors(folder / file, entries, [value for _, value in parts.values()])
        files[file] = {"bytes": size, "sha256": digest}
        for key, (offsets, value) in parts.items():
            name = key.partition("@")[0]
            known = {"dtype": dtype_name(value.dtype), "shape": list(whole[name].shape), "chunks": []}
            chunk = {"file": file, "key": key, "offsets": offsets, "shape": list(value.shape)}
            tensors.setdefault(name, known)["chunks"].append(chunk)
    write_manifest(
        folder,
        {
            "step": step, "epoch": 0, "samples": 10 * step, "sample": 10 * step, "evaluation_due": False, "ranks": 2,
            "strategy": "zero3", "device": "cpu", "topology": {}, "saved_at": "2026-01-02T03:04:05+0000",
            "optimizer": {"class": "SGD", "groups": [], "values": {}}, "schedule": None, "scaler": None,
            "state_dict": {"tied": "head.weight", "body.weight": "body.weight", "head.weight": "head.weight",
                           "count": "count"},
            "computed": [], "files": files, "tensors": tensors,
        },
    )  # fmt: skip
    return folder, whole


def rewrite(folder: Path, **changes: Any) -> None:
    """Change a manifest as one would who knows how its digest is made."""
    content = json.loads((folder / MANIFEST).read_text())
    del content["digest"]
    write_manifest(folder, {**content, **changes})


def replace_file(folder: Path, name: str, content: bytes) -> None:
    """Another content for a file, with a digest that fits."""
    (folder / name).write_bytes(content)
    files = json.loads((folder / MANIFEST).read_text())["files"]
    files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    rewrite(folder, files=files)


class Evil:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def evil_bytes(mark: Path, kind: str) -> bytes:
    if kind == "pickle":
        return pickle.dumps(Evil(mark))
    file = io.BytesIO()
    torch.save({"weight": Evil(mark)}, file)
    return file.getvalue()
