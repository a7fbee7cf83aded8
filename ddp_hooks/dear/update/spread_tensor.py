"""Tensor of which every rank holds some ranges, as ``torch.distributed.checkpoint`` saves and loads it.

Ranges follow memory, not rows, so a DTensor cannot describe them. The checkpoint library asks a tensor for the blocks
that this rank holds, and joins the blocks of all ranks under one name. A rank that loads, with any number of ranks and
any layout, or into a whole tensor of plain DDP, reads the parts that overlap its own blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddp_hooks.comm import see
from ddp_hooks.comm.torch_compat.overrides import NO_TORCH_FUNCTION
from ddp_hooks.dear.layout.placement import ParameterRange, Placement

_aten = torch.ops.aten


class Block(NamedTuple):
    """Rectangle of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def blocks_of(shape: Sequence[int], start: int, end: int) -> Iterator[Block]:
    """Yield the rectangles that elements ``[start, end)`` of a row-major tensor consist of, in their order."""
    if start >= end:
        return
    if not shape:
        yield Block((), ())
        return
    row, inner = math.prod(shape[1:]), tuple(shape[1:])
    first, last = start // row, end // row
    if first * row < start:
        stop = min(end, (first + 1) * row)
        yield from _in_row(first, inner, start - first * row, stop - first * row)
        first += 1
    if first < last:
        yield Block((first, *[0] * len(inner)), (last - first, *inner))
    if first <= last and max(start, last * row) < end:
        yield from _in_row(last, inner, 0, end - last * row)


def _in_row(row: int, inner: tuple[int, ...], start: int, end: int) -> Iterator[Block]:
    for offsets, sizes in blocks_of(inner, start, end):
        yield Block((row, *offsets), (1, *sizes))


class SpreadTensor(Tensor):
    """Tensor over all ranks, of which this one holds :attr:`parts`; every use of its values raises.

    It may be copied (``clone``, ``deepcopy``, ``cpu()``, or by ``async_save``), and saved and loaded by
    ``torch.distributed.checkpoint``. Shape, strides, dtype and device are those of the whole.
    """

    parts: dict[ParameterRange, Tensor]  # (elements length,) each, in the storage order of the whole
    placement: Placement  # who holds which elements
    label: str  # what it is, for messages

    @staticmethod
    def __new__(
        cls,
        like: Tensor,
        dtype: torch.dtype,
        device: torch.device,
        parts: Mapping[ParameterRange, Tensor],
        placement: Placement,
        label: str,
    ) -> SpreadTensor:
        # Zero strides would be cheaper, but whoever looks at memory takes them for a tensor that is there.
        whole: SpreadTensor = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=dtype, device=device
        )
        whole.parts, whole.placement, whole.label = dict(parts), placement, label
        return whole

    def local_shards(self) -> list[Tensor]:
        """Return the elements that this rank holds, as flat tensors: the memory in use, not copies."""
        return list(self.parts.values())

    def _with(self, change: Callable[[Tensor], Tensor], dtype: torch.dtype, device: torch.device) -> SpreadTensor:
        parts = {elements: change(part) for elements, part in self.parts.items()}
        return SpreadTensor(self, dtype, device, parts, self.placement, self.label)

    __torch_function__ = NO_TORCH_FUNCTION  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        own = args[0] if args and isinstance(args[0], SpreadTensor) else None
        if own is not None and func is _aten.detach.default:
            return own._with(lambda part: part, own.dtype, own.device)
        if own is not None and func is _aten.clone.default:
            return own._with(Tensor.clone, own.dtype, own.device)
        if own is not None and func is _aten._to_copy.default:
            dtype, device = kwargs.get("dtype") or own.dtype, torch.device(kwargs.get("device") or own.device)
            return own._with(lambda part: part.to(device, dtype, copy=True), dtype, device)
        if own is not None and func in (_aten.new_empty.default, _aten.empty_like.default):
            device = torch.device(kwargs.get("device") or own.device)  # of the same shape: a copy in the making
            return own._with(lambda part: torch.empty_like(part, device=device), own.dtype, device)
        if func is _aten.copy_.default and own is not None and isinstance(args[1], SpreadTensor):
            for elements, part in own.parts.items():
                part.copy_(args[1].parts[elements])
            return own
        raise _refusal(func.__name__.split(".")[0], next(_spread_in([*args, *kwargs.values()])))

    # These do not come by way of the dispatcher. data_ptr(), for which async_save asks, is 0.

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise _refusal("numpy", self)

    def tolist(self) -> Any:
        raise _refusal("tolist", self)

    __array__ = numpy

    def __reduce_ex__(self, _: Any) -> Any:
        raise TypeError(
            f"{self.label} is spread over the ranks, and this one alone would save its part of it: pass "
            f"StateDictOptions(full_state_dict=True) to get_state_dict(), use torch.distributed.checkpoint.save(), or "
            f"call state.full_optimizer_state_dict() on all ranks{see('optimizer-state-is-sharded')}"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> SpreadTensor:
        memo[id(self)] = copied = self._with(Tensor.clone, self.dtype, self.device)
        return copied

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        held = sum(part.numel() for part in self.parts.values())
        return f"SpreadTensor({self.label}, {tuple(self.shape)}, {self.dtype}, {held} of {self.numel()} elements here)"

    # -- what torch.distributed.checkpoint asks of a tensor ---------------------------------------------------------

    def _blocks(self) -> Iterator[tuple[Block, Tensor]]:
        """Yield the rectangles that this rank holds, each with its elements in the shape of the rectangle."""
        # In storage order the tensor is row-major.
        strides = self.stride()
        order = sorted(range(self.dim()), key=lambda dim: (-strides[dim], -self.shape[dim]))
        back = [order.index(dim) for dim in range(self.dim())]
        for elements, part in self.parts.items():
            position = 0
            for block in blocks_of([self.shape[dim] for dim in order], elements.start, elements.end):
                numel = math.prod(block.sizes)
                values = part[position : position + numel].view(block.sizes).permute(back)
                yield Block(tuple(block.offsets[dim] for dim in back), tuple(values.shape)), values
                position += numel

    def __create_write_items__(self, fqn: str, _: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(offsets=torch.Size(block.offsets), sizes=torch.Size(block.sizes))
            for block, _ in self._blocks()
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return next(values for block, values in self._blocks() if torch.Size(block.offsets) == index.offset)


def _refusal(operation: str, tensor: SpreadTensor) -> RuntimeError:
    return RuntimeError(
        f"{operation}() met {tensor.label}, of which this rank holds a part, so its values would not be those of the "
        f"whole: call state.full_optimizer_state_dict() on all ranks for whole tensors, or save it with "
        f"torch.distributed.checkpoint; .local_shards() are the parts{see('optimizer-state-is-sharded')}"
    )


def _spread_in(values: Sequence[Any]) -> Iterator[SpreadTensor]:
    for value in values:
        if isinstance(value, SpreadTensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _spread_in(value)
