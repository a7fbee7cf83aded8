"""Configurations of somebody else's loop: a hook for dense gradients, tables that travel by row, or both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor, nn

from ddp_hooks.comm import check_booleans, see
from ddp_hooks.dear import DearConfig
from ddp_hooks.embedding import TableConfig
from ddp_hooks.quantized import QuantizedConfig
from ddp_hooks.topk import TopKConfig
from fsdp_ext import ExtConfig

Dense: TypeAlias = DearConfig | TopKConfig | QuantizedConfig

BUCKET_MB = 5
"""Size of DDP's buckets where the user has left the default; see docs/dear.md."""


@dataclass(frozen=True)
class Tables:
    """Embedding tables that travel by row, for loops that make model, optimizer and loader themselves.

    Args:
        ids: function that returns all ids of a batch by table, as for :meth:`~ddp_hooks.EmbeddingTables.prefetch`.
            None: every lookup waits for its vectors.
        modules, optimizer_class, config: see :func:`~ddp_hooks.shard_embeddings`.
        options: of ``optimizer_class``; the default of ``lr`` is the loop's own.
        follow_schedule: tables' learning rate = their first rate × present rate / first rate of the first group of the
            loop's optimizer.

    Raises:
        TypeError: ``ids`` is no function, or ``config`` no :class:`~ddp_hooks.TableConfig`.
    """

    ids: Callable[[Any], Mapping[str, Tensor | Sequence[Tensor]]] | None = None
    modules: int | str | nn.Module | type | Iterable[str | nn.Module | type] | None = None
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.SparseAdam
    options: Mapping[str, Any] = field(default_factory=dict)
    config: TableConfig = field(default_factory=TableConfig)
    follow_schedule: bool = True

    def __post_init__(self) -> None:
        if self.ids is not None and not callable(self.ids):
            raise TypeError(f"ids must be None or a function of a batch, got {self.ids!r}")
        if not isinstance(self.config, TableConfig):
            raise TypeError(f"config must be a TableConfig(...), got {self.config!r}")
        check_booleans(self)


Part: TypeAlias = Dense | Tables | TableConfig | ExtConfig
Config: TypeAlias = Part | Sequence[Part]


class Combination(NamedTuple):
    dense: Dense | None  # hook of DDP's buckets; None: DDP's own all-reduce
    tables: Tables | None  # None: they stay whole
    extension: ExtConfig | None = None  # of FSDP2; excludes the other parts


def combination_of(config: Config) -> Combination:
    """Take a configuration apart; raise TypeError or ValueError if it is none, or if its parts exclude each other."""
    parts = list(config) if isinstance(config, (list, tuple)) else [config]
    for part in parts:
        if isinstance(part, ExtConfig):
            if len(parts) == 1:
                return Combination(None, None, part)
            raise ValueError(
                f"ExtConfig is for models that FSDP2 shards, and goes alone; the others are for DDP: "
                f"got {parts}{see('in-a-trainer')}"
            )
        if not isinstance(part, (*get_args(Dense), Tables, TableConfig)):
            raise TypeError(
                f"a configuration is a DearConfig, TopKConfig, QuantizedConfig, Tables or TableConfig, or a list of "
                f"one of the first three and tables, or with FSDP2 an ExtConfig; got {part!r}"
            )
    dense: list[Dense] = [part for part in parts if isinstance(part, get_args(Dense))]
    given = [Tables(config=part) if isinstance(part, TableConfig) else part for part in parts]
    tables = [part for part in given if isinstance(part, Tables)]
    kinds = sorted({type(part).__name__ for part in dense})
    if len(kinds) > 1:
        remedy = "leave out the others"
        if kinds == ["DearConfig", "TopKConfig"]:
            remedy = 'for sparse gradients that arrive in the next forward write TopKConfig(pipeline="forward")'
        raise ValueError(
            f"{' and '.join(kinds)} are {len(kinds)} hooks, and DDP has one: {remedy}{see('in-a-trainer')}"
        )
    if len(dense) > 1 or len(tables) > 1:
        raise ValueError(f"one configuration of a kind is enough, got {parts}")
    if not parts:
        raise ValueError(
            "nothing is configured: give a DearConfig, a TopKConfig, a QuantizedConfig, Tables, or a list of them"
        )
    chosen = dense[0] if dense else None
    if isinstance(chosen, DearConfig) and chosen.update == "sharded":
        chosen = replace(chosen, update="auto")  # these loops come with any optimizer
    return Combination(chosen, tables[0] if tables else None)
