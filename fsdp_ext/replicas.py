"""HSDP's all-reduce over replicas, in the place of FSDP2's own.

What a reduce-scatter has made FSDP2 gives to ``torch.distributed.all_reduce``, and on CPUs the backward stands still
until gloo is through. PyTorch asks tensors of other classes what functions do with them (``__torch_function__``), that
one included; and the memory of the result is ours to allocate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import all_reduce
from torch.overrides import has_torch_function


class Reduction(Protocol):
    """What fills the memory of an :class:`Output`."""

    def all_reduce(self, output: Tensor, group: dist.ProcessGroup | None, op: Any) -> bool:
        """Do what ``dist.all_reduce`` does to ``output``, which may be filled later; False: leave it to that."""

    def finish(self) -> None:
        """Fill what is not filled yet."""


class Output(Tensor):
    """Memory for a rank's part of the gradients, of which ``reduction`` decides when it is filled and all-reduced."""

    reduction: Reduction
    memory: Tensor  # the same, a plain tensor

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Replace ``dist.all_reduce``; what uses it before that finds it filled. Results are plain tensors."""
        kwargs = dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            outputs = [each for each in (*args, *kwargs.values()) if isinstance(each, cls)]
            if func is all_reduce and not kwargs["async_op"]:
                (output,) = outputs
                if output.reduction.all_reduce(output.memory, kwargs["group"], kwargs["op"]):
                    return None
            for output in outputs:
                output.reduction.finish()
            return func(*args, **kwargs)


def output_of(memory: Tensor, reduction: Reduction) -> Output:
    """``memory`` as such a tensor."""
    output = memory.as_subclass(Output)
    output.reduction, output.memory = reduction, memory
    return output


def are_asked() -> bool:
    """Whether functions ask such tensors now; not inside of a backward that another class's tensor has begun, say."""
    return has_torch_function((_ANY,))


def memory_of(tensor: Tensor) -> Tensor:
    """A plain tensor of the same memory."""
    return tensor.memory if isinstance(tensor, Output) else tensor


_ANY = torch.empty(0).as_subclass(Output)
