"""Parameters that DDP reduces, in a fixed order."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from ddp_hooks.comm.torch_compat.overrides import without_overrides


class ManagedParameters:
    """Parameters that DDP reduces; code that knows them speaks of them by index.

    Args:
        named: name -> parameter, in the same order on every rank.
    """

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        self.names = list(named)
        self.tensors = list(named.values())
        self.numels = tuple(parameter.numel() for parameter in self.tensors)
        self.device = self.tensors[0].device
        self._index_of = {id(parameter): index for index, parameter in enumerate(self.tensors)}

    def __len__(self) -> int:
        return len(self.tensors)

    def index_of(self, tensor: object) -> int | None:
        """Return the index of a parameter; None for anything else."""
        return self._index_of.get(id(tensor))

    def gradients(self) -> list[Tensor | None]:
        """Return every ``.grad``, guards included, without waiting for parameters in flight."""
        with without_overrides():
            return [parameter.grad for parameter in self.tensors]
