"""Linear layers, norms and embeddings that Rung cuts or adapts, and their sizes."""

from __future__ import annotations

from torch import Tensor, nn


def is_linear(module: nn.Module) -> bool:
    """Whether the module is nn.Linear itself or Conv1D; a subclass may use its weight differently."""
    return type(module) is nn.Linear or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """Hugging Face's `Conv1D`: a linear layer whose weight is (in, out)."""
    weight = getattr(module, "weight", None)
    if type(module).__name__ != "Conv1D" or not isinstance(weight, Tensor):
        return False
    return hasattr(module, "nf") and weight.dim() == 2 and weight.shape[1] == module.nf


def is_norm(module: nn.Module) -> bool:
    """Whether the module normalises over the last dimension only, so that positions are independent."""
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return len(module.normalized_shape) == 1
    named = type(module).__name__.endswith(("RMSNorm", "LayerNorm"))
    return named and not list(module.children()) and all(p.dim() == 1 for p in module.parameters())


def output_dim(module: nn.Module) -> int:
    """The dimension of a linear layer's weight that holds output features."""
    return 1 if is_conv1d(module) else 0


def num_outputs(module: nn.Module) -> int:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return int(weight.shape[output_dim(module)])


def num_inputs(module: nn.Module) -> int:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return int(weight.shape[1 - output_dim(module)])


def can_shard(size: int, num_ranks: int) -> bool:
    """Whether `torch.chunk` of `size` gives every rank a part."""
    return size > (num_ranks - 1) * -(-size // num_ranks)


def is_plain(module: nn.Embedding) -> bool:
    """Whether an embedding only looks up rows; max_norm, sparse and scale_grad_by_freq need all rows or indices."""
    return module.max_norm is None and not module.sparse and not module.scale_grad_by_freq
