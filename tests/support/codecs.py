"""Values, and their way through a codec."""

from __future__ import annotations

import torch
from torch import Tensor

from ddp_hooks.comm.wire.codecs import Codec


def there_and_back(codec: Codec, values: Tensor) -> Tensor:
    """Return the numbers that a payload of ``values`` says."""
    payload = torch.empty(codec.nbytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, payload)
    decoded = torch.empty_like(values)
    codec.decode(payload, decoded)
    return decoded


def normal(numel: int, seed: int) -> Tensor:
    return torch.empty(numel).normal_(generator=torch.Generator().manual_seed(seed))
