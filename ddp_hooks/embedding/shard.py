"""Sharding of a model's embeddings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_hooks.comm import agree
from ddp_hooks.embedding.config import TableConfig
from ddp_hooks.embedding.exchange.channels import Exchanger
from ddp_hooks.embedding.selection import Selected, Which, find_problem, select
from ddp_hooks.embedding.step import updates
from ddp_hooks.embedding.table import Table, column_bounds
from ddp_hooks.embedding.tables import EmbeddingTables


def shard_embeddings(
    model: nn.Module,
    process_group: dist.ProcessGroup | None = None,
    modules: int | Which | Iterable[Which] | None = None,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.SparseAdam,
    *,
    config: TableConfig | None = None,
    coordinator: Exchanger | None = None,
    **optimizer_options: Any,
) -> EmbeddingTables:
    """Split large embeddings by columns over the ranks (EmbRace, section 4.1), in place, before wrapping the model.

    Each of these ``nn.Embedding`` becomes a :class:`ShardedEmbedding` with the same forward. DDP, FSDP2 and the model's
    optimizer do not see its weight. Training gives the same result as ``nn.Embedding(sparse=True)`` with the same
    optimizer under plain DDP.

    Collective: all ranks call it, before ``DistributedDataParallel`` or ``fully_shard``. Tables begin with the weights
    of the first rank.

    Args:
        model: changed in place.
        process_group: ranks of data parallelism; None: all ranks.
        modules: names, modules or types of modules, or a smallest number of rows. None: every ``nn.Embedding`` that is
            trained and has at least 4096 rows.
        optimizer_class: ``SGD``, ``Adagrad``, ``SparseAdam`` or :class:`RowwiseAdamW`, which update rows one by one.
        config: settings of the exchange.
        coordinator: a ``ddp_hooks.coordination.Coordinator`` of the same ranks, on CPUs. It moves urgent exchanges of
            tables before gradients, and delayed rows after them.
        **optimizer_options: for ``optimizer_class``, such as ``lr``.

    Raises:
        ValueError: on every rank, before the model is changed: tables cannot be made, or ranks differ.
        LaneError, LaneTimeout: some rank did not call it.
    """
    config = config if config is not None else TableConfig()
    group = process_group if process_group is not None else dist.group.WORLD
    if group is None:
        raise ValueError("torch.distributed is not initialised: call init_process_group(), or launch with torchrun")
    selected: list[Selected] = []
    problem = updates.find_problem(optimizer_class, optimizer_options)
    if problem is None:
        try:
            selected = select(model, modules)
            problem = find_problem(selected, config) or _problem_of_devices(selected, coordinator, group)
        except ValueError as error:
            problem = str(error)
    entries = _fingerprint(selected, optimizer_class, optimizer_options, config) if problem is None else {}
    entries["coordinator"] = coordinator is not None
    agree(entries, problem, group, "the set-up of shard_embeddings", config)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    tables = [_table_of(index, one, rank, world_size) for index, one in enumerate(selected)]
    optimizer = optimizer_class([(table.name, table.weight) for table in tables], **optimizer_options)
    result = EmbeddingTables(model, tables, optimizer, group, config, coordinator)
    result.replace(selected)
    return result


def _table_of(index: int, selected: Selected, rank: int, world_size: int) -> Table:
    module, weight = selected.module, selected.module.weight
    bounds = column_bounds(module.embedding_dim, world_size)
    own = weight.new_empty(module.num_embeddings, bounds[rank + 1] - bounds[rank])
    return Table(
        index=index,
        name=selected.name,
        aliases=tuple(path for path, _ in selected.places[1:]),
        num_rows=module.num_embeddings,
        dim=module.embedding_dim,
        bounds=bounds,
        rank=rank,
        weight=torch.nn.Parameter(own),
        padding_idx=module.padding_idx,
    )


def _problem_of_devices(
    selected: Sequence[Selected], coordinator: Exchanger | None, group: dist.ProcessGroup
) -> str | None:
    devices = {str(one.module.weight.device) for one in selected}
    if len(devices) > 1:
        return f"the tables must be on one device, found {sorted(devices)}"
    if coordinator is None:
        return None
    if devices != {"cpu"}:
        return f"coordinators move what is on CPUs, and the tables are on {sorted(devices)}: leave coordinator out"
    ranks, theirs = dist.get_process_group_ranks(group), getattr(coordinator, "ranks", None)
    if theirs != ranks:
        return f"the coordinator has ranks {theirs}, and the tables have {ranks}: make them of one group"
    return None


def _fingerprint(
    selected: Sequence[Selected], optimizer_class: Any, options: dict[str, Any], config: TableConfig
) -> dict[str, object]:
    from ddp_hooks import __version__

    entries: dict[str, object] = {
        "torch version": torch.__version__,
        "ddp_hooks version": __version__,
        "TableConfig": config,
        "optimizer_class": optimizer_class.__qualname__,
        "the optimizer's options": sorted(options.items()),
    }
    for one in selected:
        places, weight = ", ".join(path for path, _ in one.places), one.module.weight
        entries[f"table {one.name}"] = (
            f"{tuple(weight.shape)} {weight.dtype} padding {one.module.padding_idx} as {places}"
        )
    return entries
