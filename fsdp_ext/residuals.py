"""Error feedback: losses of gradients by rounding or selection, kept on each rank for whole gradients.

A checkpoint has one number per element of a parameter, sharded as the parameter is: the sum over all ranks, in the unit
of the gradient that the optimizer gets. So residuals are as large as the model, and fit any number of ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_ext import compat
from fsdp_ext.checks import ROOT

logger = logging.getLogger("fsdp_ext")

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # of torch.compile and activation checkpointing


class Residuals:
    """Residuals of one module, as long as the memory that FSDP2 reduces its gradients in."""

    def __init__(self, module: FSDPModule, names: Mapping[nn.Module, str]) -> None:
        self._module = module
        self._names = names  # of all modules of the model
        self._replicas = compat.replicas_of(module)
        self._columns: tuple[compat.Column, ...] = ()
        self._flat: Tensor | None = None  # (P * n,), in the unit of sums
        self._group: dist.ProcessGroup | None = None  # of the ranks that sum
        self._unit = 1.0  # sum / unit = gradient, averaged over replicas
        self._has_warned = False
        self._loaded: dict[str, Tensor] = {}  # this rank's shards, in the unit of gradients

    def prepare(self, gradients: Tensor, group: dist.ProcessGroup, op: Any) -> Tensor | None:
        """Return the residual to add to ``gradients``, (P * n,), multiplied by ``op``'s factor already.

        It is to be overwritten with their loss. None in a step without gradients of some parameters: the others have
        other places then, and the residual waits for the next step that has all of them.
        """
        world_size, rank = dist.get_world_size(group), dist.get_rank(group)
        columns = compat.columns_in(self._module, gradients.numel() // world_size)
        if columns is None:
            self._warn_of_missing_gradients()
            return None
        if self._flat is None or columns != self._columns:
            flat = torch.zeros(gradients.numel(), dtype=_dtype_for(gradients), device=gradients.device)
            former = {self._name(column): column for column in self._columns}
            for column in columns:
                before = former.get(self._name(column))
                if self._flat is not None and before is not None:
                    shares = self._flat.view(world_size, -1)
                    flat.view(world_size, -1)[:, column.start : column.stop] = shares[:, before.start : before.stop]
            self._flat = flat
        unit = self._unit_of(op, world_size, gradients.dtype)
        if unit != self._unit:
            self._flat.mul_(unit / self._unit)
        self._columns, self._group, self._unit = columns, group, unit
        own = self._flat.view(world_size, -1)[rank]
        for column in columns:
            if (shard := self._loaded.pop(self._name(column), None)) is not None:
                own[column.start : column.start + shard.numel()].add_(shard.view(-1), alpha=unit)
                if shard.device.type == "cuda":  # made on another stream than this one, which is FSDP2's
                    shard.record_stream(torch.cuda.current_stream(shard.device))
        return self._flat

    def scale(self, factor: float) -> None:
        for residual in (*self._loaded.values(), *([self._flat] if self._flat is not None else [])):
            residual.mul_(factor)

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """Groups over which :meth:`move_to_owners` is collective."""
        return [] if self._flat is None else [group for group in (self._group, self._replicas) if group is not None]

    def move_to_owners(self) -> None:
        """Move all residuals to the ranks that own the shards; collective, between steps."""
        if self._flat is None or self._group is None:
            return
        shares = self._flat.view(dist.get_world_size(self._group), -1)
        own = torch.empty_like(shares[0])
        dist.reduce_scatter_tensor(own, self._flat, group=self._group)
        own.div_(self._unit)
        if self._replicas is not None:
            dist.all_reduce(own, group=self._replicas)
            own.div_(dist.get_world_size(self._replicas))
        self._flat.zero_()
        shares[dist.get_rank(self._group)] = own.mul_(self._unit)

    def state_dict(self) -> dict[str, DTensor]:
        """Return the residuals of every trained parameter, by name, after :meth:`move_to_owners`."""
        state = {}
        for column in compat.columns_of(self._module):
            name, parameter = self._name(column), column.parameter
            assert isinstance(parameter, DTensor)
            state[name] = DTensor.from_local(
                self._shard(name, parameter.to_local()),
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        return state

    def load_state_dict(self, state: Mapping[str, DTensor]) -> set[str]:
        """Replace all residuals by those in ``state``; return the names that were found."""
        self._flat, self._columns = None, ()
        found = state.keys() & set(map(self._name, compat.columns_of(self._module)))
        shards = {name: state[name].to_local().detach() for name in found}
        self._loaded = {name: shard.clone() for name, shard in shards.items() if not shard.is_meta}
        return found

    def _unit_of(self, op: Any, world_size: int, dtype: torch.dtype) -> float:
        """Sum over shards and replicas / (unit * replicas) = gradient, as in FSDP2's _get_gradient_divide_factors."""
        num_replicas = 1 if self._replicas is None else dist.get_world_size(self._replicas)
        if op != dist.ReduceOp.AVG and op != dist.ReduceOp.SUM:  # PREMUL_SUM: it divides before
            return 1 / num_replicas
        total = compat.facts_of(self._module).factor or world_size * num_replicas
        if op == dist.ReduceOp.SUM and dtype not in (torch.float32, torch.bfloat16):
            predivisor = 1  # FSDP2 divides by it before it adds, as sums overflow soon
            while total % predivisor == 0 and total / predivisor > predivisor:
                predivisor *= 2
            total /= predivisor
        return total / num_replicas

    def _shard(self, name: str, like: Tensor) -> Tensor:
        if name in self._loaded:
            return self._loaded[name].clone()
        places = {self._name(column): column.start for column in self._columns}
        if self._flat is None or self._group is None or name not in places:
            return torch.zeros(like.shape, dtype=_dtype_for(like), device=like.device)
        own = self._flat.view(dist.get_world_size(self._group), -1)[dist.get_rank(self._group)]
        return own[places[name] : places[name] + like.numel()].view(like.shape) / self._unit

    def _warn_of_missing_gradients(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            assert isinstance(self._module, nn.Module)
            logger.warning(
                "%s: some of its parameters have no gradient. In such steps its gradients are reduced without earlier "
                "residuals: in full where they are sparse, and the loss of rounding is not kept. With "
                "set_reduce_scatter_unused_params(True) FSDP2 takes zeros for missing gradients",
                self._names.get(self._module) or ROOT,
            )

    def _name(self, column: compat.Column) -> str:
        prefix = self._names.get(column.owner, "")
        name = f"{prefix}.{column.name}" if prefix else column.name
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        return name


def _dtype_for(values: Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32
