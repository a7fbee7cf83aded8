"""Tensors in the order of their memory.

With channels_last and other dense layouts a parameter's elements are not row-major in memory. DDP lays gradients out
with the parameter's strides, so gradients and parameters agree when both are read in storage order.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Return True if the elements fill one run of memory, each place once, in any order of dimensions."""
    expected = 1
    dims = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)
    for stride, size in dims:
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def in_storage_order(tensor: Tensor) -> Tensor:
    """Return a 1-D view of a dense tensor's memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def in_order_of(values: Tensor, like: Tensor) -> Tensor:
    """Return ``values`` as a 1-D tensor in the storage order of the dense tensor ``like``, of the same shape."""
    if values.stride() != like.stride() or not is_dense(values):
        values = torch.empty_strided(like.shape, like.stride(), dtype=values.dtype, device=values.device).copy_(values)
    return in_storage_order(values)


def shaped_like(parameter: Tensor, flat: Tensor) -> Tensor:
    """Copy ``flat``, a 1-D tensor in the storage order of ``parameter``, into a tensor of its shape and strides."""
    shaped = torch.empty_strided(parameter.shape, parameter.stride(), dtype=flat.dtype, device=flat.device)
    in_storage_order(shaped).copy_(flat)
    return shaped
