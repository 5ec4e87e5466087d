"""Which model a cache belongs to."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

__all__ = ["fingerprint"]

_SAMPLES = 64


def fingerprint(model: nn.Module) -> str:
    """A name for a model's weights: SHA-256 over the names, shapes and dtypes of all parameters and buffers, and a
    sample of their values (64 each, evenly spread): enough to tell a fine-tuned model from its base, at hardly any
    cost.
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        flat = tensor.detach().reshape(-1)
        if flat.numel():
            index = torch.linspace(0, flat.numel() - 1, _SAMPLES, dtype=torch.float64, device=flat.device).long()
            sample = flat[index].double() if flat.is_floating_point() else flat[index].long()
            digest.update(str(sample.tolist()).encode())
    return digest.hexdigest()
