"""What stands in the model where an ``nn.Embedding`` was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ddp_hooks.comm import torch_compat
from ddp_hooks.embedding.table import Table
from ddp_hooks.embedding.vectors import Lookup

if TYPE_CHECKING:
    from ddp_hooks.embedding.tables import EmbeddingTables


class ShardedEmbedding(nn.Module):
    """An ``nn.Embedding`` of which every rank holds some columns; same forward, made by ``shard_embeddings``.

    Its weight is no parameter of the module, so that DDP and FSDP2 leave it alone and the model's optimizer does not
    see it; ``tables.optimizer`` updates it.

    Args:
        tables: whom it belongs to.
        table: which one it is.
        is_first: of the modules that share the table.
    """

    def __init__(self, tables: EmbeddingTables, table: Table, is_first: bool) -> None:
        super().__init__()
        self.num_embeddings = table.num_rows
        self.embedding_dim = table.dim
        self.padding_idx = table.padding_idx
        self.tables = tables
        self.index = table.index
        self._table = table
        self._is_first = is_first
        self._parameters = _HiddenParameters(tables, table.weight if is_first else None)

    @property
    def weight(self) -> Tensor:
        """The table, (num_embeddings, embedding_dim), inside of ``tables.local()``; otherwise raises.

        In a model of FSDP2's it is a DTensor of all ranks' columns, as parameters are DTensors there.
        """
        return self.tables.weight_of(self._table.index, f"{self._table.name}.weight")

    def requires_grad_(self, requires_grad: bool = True) -> ShardedEmbedding:
        """Train the table from now on, or not; all ranks do the same."""
        self.tables.requires_grad_(requires_grad, [self._table.name])
        return self

    @torch.compiler.disable
    def forward(self, input: Tensor) -> Tensor:
        """The vectors of some ids.

        Args:
            input: ids of any shape, int32 or int64.

        Returns:
            Their vectors, ``(*input.shape, embedding_dim)``.
        """
        return self.tables.embed(self._table.index, input)

    def extra_repr(self) -> str:
        """As ``nn.Embedding`` has it, with the columns that are here."""
        padding = f", padding_idx={self.padding_idx}" if self.padding_idx is not None else ""
        columns = self._table.weight.shape[1]
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, {columns} columns here"

    def _apply(self, fn: Any, recurse: bool = True) -> ShardedEmbedding:
        super()._apply(fn, recurse)
        if self._is_first:
            self.tables.convert(self._table.index, fn)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.tables.weight_to_save(self._table.index)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = prefix + "weight"
        full = state_dict.get(key)
        if full is None:
            missing_keys.append(key)
        elif tuple(full.shape) != (self._table.num_rows, self._table.dim):
            shape = self._table.num_rows, self._table.dim
            error_msgs.append(f"{key} must have the shape {shape} of the whole table, got {tuple(full.shape)}")
        else:
            self.tables.load_weight(self._table.index, full)

    def __deepcopy__(self, memo: Any) -> ShardedEmbedding:
        raise TypeError(
            "a model with sharded tables cannot be copied: the copy would communicate for the original. Build a model "
            "without them and load tables.full_state_dict() into it"
        )


class _HiddenParameters(dict[str, Any]):
    """The module's parameters: none, but for ``torch.distributed.checkpoint.state_dict``.

    That looks names of an optimizer's parameters up in the model.

    Args:
        tables: whom the module belongs to.
        weight: this rank's columns.
    """

    def __init__(self, tables: EmbeddingTables, weight: nn.Parameter | None) -> None:
        super().__init__()
        self._tables = tables
        self._weight = weight

    def items(self) -> Any:
        """As a dictionary's."""
        if self._weight is not None and torch_compat.inside_state_dict_api():
            self._tables.look_for_own_optimizer()
            return {"weight": self._weight}.items()
        return super().items()


class GatheredVectors(torch.autograd.Function):
    """Picks vectors that were looked up, and hands their gradient to the lookup."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, lookup: Lookup, positions: Tensor, tables: EmbeddingTables) -> Tensor:
        """``anchor``, of no elements, requires a gradient, so that this is differentiable."""
        ctx.lookup, ctx.tables, ctx.came = lookup, tables, False
        ctx.save_for_backward(positions)
        assert lookup.vectors is not None
        return lookup.vectors.index_select(0, positions)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        """Coalesce."""
        (positions,) = ctx.saved_tensors
        ctx.tables.receive_gradient(ctx.lookup, positions, gradient, not ctx.came)
        ctx.came = True
        return None, None, None, None
