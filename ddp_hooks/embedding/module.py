"""Module that takes the place of an ``nn.Embedding`` in the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ddp_hooks.comm.torch_compat import is_inside
from ddp_hooks.comm.torch_compat.state_dict import inside_state_dict_api
from ddp_hooks.embedding.checkpoint import TableCheckpoint
from ddp_hooks.embedding.step.scheduler import StepScheduler
from ddp_hooks.embedding.table import Table


class ShardedEmbedding(nn.Module):
    """An ``nn.Embedding`` whose columns are split over the ranks; same forward, made by ``shard_embeddings``.

    Its weight is no parameter of the module, so DDP, FSDP2 and the model's optimizer do not see it;
    ``tables.optimizer`` updates it.
    """

    def __init__(
        self, tables: Any, scheduler: StepScheduler, checkpoint: TableCheckpoint, table: Table, is_first: bool
    ) -> None:
        super().__init__()
        self.num_embeddings = table.num_rows
        self.embedding_dim = table.dim
        self.padding_idx = table.padding_idx
        self.tables = tables  # which live as long as the module
        self._scheduler = scheduler
        self._checkpoint = checkpoint
        self._table = table
        self._is_first = is_first  # of the modules that share the table
        self._parameters = _HiddenParameters(checkpoint, table, is_first)

    @property
    def weight(self) -> Tensor:
        """The table, (num_embeddings, embedding_dim), inside of ``tables.local()``; otherwise raises ``RuntimeError``.

        In a model of FSDP2's it is a DTensor of all ranks' columns, as parameters are DTensors there.
        """
        return self._checkpoint.weight_of(self._table, f"{self._table.name}.weight")

    def requires_grad_(self, requires_grad: bool = True) -> ShardedEmbedding:
        """Train or freeze the table from now on; all ranks do the same."""
        self._scheduler.requires_grad.set(self._table.index, requires_grad)
        return self

    @torch.compiler.disable
    def forward(self, input: Tensor) -> Tensor:
        """Return the vectors, ``(*input.shape, embedding_dim)``, of int32 or int64 ids of any shape.

        Raises:
            ValueError: some rank asks for an id that is no row.
            RuntimeError: ranks are desynchronized, or the tables were closed.
            LaneError, LaneTimeout: vectors did not arrive.
        """
        return self._scheduler.embed(self._table, input)

    def extra_repr(self) -> str:
        padding = f", padding_idx={self.padding_idx}" if self.padding_idx is not None else ""
        columns = self._table.weight.shape[1]
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, {columns} columns here"

    def _apply(self, fn: Any, recurse: bool = True) -> ShardedEmbedding:
        super()._apply(fn, recurse)
        if self._is_first:
            self._checkpoint.convert(self._table, fn)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self._checkpoint.weight_to_save(self._table)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, *messages: list[str]
    ) -> None:
        missing_keys, _, error_msgs = messages
        key, shape = prefix + "weight", self._table.shape
        full = state_dict.get(key)
        if full is None:
            missing_keys.append(key)
        elif tuple(full.shape) != shape:
            error_msgs.append(f"{key} must have the shape {shape} of the whole table, got {tuple(full.shape)}")
        else:
            self._checkpoint.load_weight(self._table, full)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a model with sharded tables cannot be copied or pickled: the copy would communicate for the original. "
            "Build a model without them and load tables.full_state_dict() into it"
        )


class _HiddenParameters(dict[str, Any]):
    """This rank's columns, for ``requires_grad_()`` and ``torch.distributed.checkpoint.state_dict``; otherwise none."""

    def __init__(self, checkpoint: TableCheckpoint, table: Table, is_first: bool) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._table = table
        self._is_first = is_first

    def items(self) -> Any:
        if is_inside("torch.nn.modules.module", "requires_grad_"):
            return {"weight": self._table.weight}.items()
        if self._is_first and inside_state_dict_api():
            self._checkpoint.warn_if_left_out()
            return {"weight": self._table.weight}.items()
        return super().items()
