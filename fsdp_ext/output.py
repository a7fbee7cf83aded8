"""What FSDP2 does to the result of a reduce-scatter, done when that has come.

FSDP2 all-reduces it over replicas (HSDP), divides it, and makes gradients of views of it, at once; on CPUs the backward
would stand still until it is there. But the memory is ours to allocate, and PyTorch asks tensors of other classes what
functions do with them (``__torch_function__``), ``torch.distributed.all_reduce`` included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import all_reduce

# They do not need what is in it. (In Python each access makes another object, which is equal.)
_FACTS = tuple(getattr(Tensor, name).__get__ for name in ("dtype", "shape", "device", "layout"))


class Reduction(Protocol):
    """What fills the memory of an :class:`Output`."""

    def all_reduce(self, output: Tensor, group: dist.ProcessGroup | None, op: Any) -> bool:
        """Do what ``dist.all_reduce`` does to ``output``, perhaps later; False: leave it to that."""

    def divide(self, divisor: float) -> bool:
        """Divide what is not filled yet, when it is; False: it is filled."""

    def view(self) -> None:
        """Gradients are about to be made of it: nothing follows that changes it."""

    def finish(self) -> None:
        """Fill it now, for whatever else uses it."""


class Output(Tensor):
    """Memory for a rank's part of the gradients, of which ``reduction`` decides when it is filled."""

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
        """Results are plain tensors."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.as_strided and args:  # for every parameter
                args[0].reduction.view()
                return func(*args, **kwargs)
            given = [each if isinstance(each, (list, tuple)) else (each,) for each in (*args, *kwargs.values())]
            for output in (each for several in given for each in several if isinstance(each, cls)):
                if output._takes_over(func, args, kwargs):
                    return None if func is all_reduce else output
            return func(*args, **kwargs)

    def _takes_over(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether the reduction does it, or will; whoever else uses the memory finds it filled."""
        if func in _FACTS:
            return False
        if func is all_reduce and not kwargs["async_op"]:
            takes_over = self.reduction.all_reduce(self.memory, kwargs["group"], kwargs["op"])
        else:
            takes_over = func == Tensor.div_ and not kwargs and args[0] is self and self.reduction.divide(args[1])
        if not takes_over:
            self.reduction.finish()
        return takes_over


def output_of(memory: Tensor, reduction: Reduction) -> Output:
    """``memory`` as such a tensor."""
    output = memory.as_subclass(Output)
    output.reduction, output.memory = reduction, memory
    return output


def memory_of(tensor: Tensor) -> Tensor:
    """A plain tensor of the same memory."""
    return tensor.memory if isinstance(tensor, Output) else tensor


def are_asked() -> bool:
    """Whether functions ask such tensors now; not inside of a backward that another class's tensor has begun, say."""
    return torch._C._is_torch_function_enabled()
