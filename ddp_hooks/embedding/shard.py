"""Making tables of a model's embeddings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_hooks.comm import agree
from ddp_hooks.embedding import updates
from ddp_hooks.embedding.channels import Exchanger
from ddp_hooks.embedding.choose import Chosen, Which, choose, find_problem
from ddp_hooks.embedding.config import TableConfig
from ddp_hooks.embedding.module import ShardedEmbedding
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

    Each ``nn.Embedding`` that is meant becomes a :class:`ShardedEmbedding` with the same forward. DDP, FSDP2 and the
    model's optimizer do not see its weight. The result of training is that of an ``nn.Embedding(sparse=True)`` with the
    same optimizer under plain DDP.

    Collective: all ranks do it, before ``DistributedDataParallel`` or ``fully_shard``. Tables begin with the weights of
    the first rank.

    Args:
        model: changed in place.
        process_group: of data parallelism; None: all ranks.
        modules: which: names, modules or types of modules, or how many rows they have at least. None: every
            ``nn.Embedding`` that is trained and has at least 4096 rows.
        optimizer_class: ``SGD``, ``Adagrad``, ``SparseAdam`` or :class:`RowwiseAdamW`, whose updates of a row look at
            no other one.
        config: settings of the exchange.
        coordinator: a ``ddp_hooks.coordination.Coordinator`` of the same ranks, that orders what tables send among
            all that it moves: what is waited for before gradients, delayed rows after them. On CPUs.
        **optimizer_options: for ``optimizer_class``, such as ``lr``.

    Raises:
        ValueError: on every rank, before anything is changed, when this cannot be right, or when ranks differ.
    """
    config = config if config is not None else TableConfig()
    group = process_group if process_group is not None else dist.group.WORLD
    if group is None:
        raise ValueError("torch.distributed is not initialised: call init_process_group(), or launch with torchrun")
    chosen: list[Chosen] = []
    problem = updates.find_problem(optimizer_class, optimizer_options)
    if problem is None:
        try:
            chosen = choose(model, modules)
            problem = find_problem(chosen, config) or _problem_of_devices(chosen)
            problem = problem or _problem_of_coordinator(coordinator, chosen, group)
        except ValueError as error:
            problem = str(error)
    entries = _fingerprint(chosen, optimizer_class, optimizer_options, config) if problem is None else {}
    entries["coordinator"] = coordinator is not None
    agree(entries, problem, group, "the set-up of shard_embeddings", config)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    tables = [_table_of(index, one, rank, world_size) for index, one in enumerate(chosen)]
    optimizer = optimizer_class([(table.name, table.weight) for table in tables], **optimizer_options)
    result = EmbeddingTables(model, tables, optimizer, group, config, coordinator)
    result.begin_with([one.weight for one in chosen])
    for table, one in zip(tables, chosen, strict=True):
        _replace(result, table, one)
    result.have_moved_in()
    return result


def _table_of(index: int, chosen: Chosen, rank: int, world_size: int) -> Table:
    module, weight = chosen.places[0].module, chosen.weight
    bounds = column_bounds(module.embedding_dim, world_size)
    own = torch.empty(
        module.num_embeddings, bounds[rank + 1] - bounds[rank], dtype=weight.dtype, device=weight.device
    )
    return Table(
        index=index,
        name=chosen.name,
        aliases=tuple(place.path for place in chosen.places[1:]),
        num_rows=module.num_embeddings,
        dim=module.embedding_dim,
        bounds=bounds,
        weight=torch.nn.Parameter(own),
        padding_idx=module.padding_idx,
    )


def _replace(tables: EmbeddingTables, table: Table, chosen: Chosen) -> None:
    made: dict[int, ShardedEmbedding] = {}
    for place in chosen.places:
        key = id(place.module)
        if key not in made:
            made[key] = ShardedEmbedding(tables, table, is_first=not made).train(place.module.training)
        setattr(place.parent, place.attribute, made[key])
    for _, module, attribute in chosen.others:
        setattr(module, attribute, torch.nn.Parameter(chosen.weight.detach().clone()))


def _problem_of_devices(chosen: Sequence[Chosen]) -> str | None:
    devices = {str(one.weight.device) for one in chosen}
    if len(devices) > 1:
        return f"the tables must be on one device, found {sorted(devices)}"
    return None


def _problem_of_coordinator(
    coordinator: Exchanger | None, chosen: Sequence[Chosen], group: dist.ProcessGroup
) -> str | None:
    if coordinator is None:
        return None
    devices = {one.weight.device.type for one in chosen}
    if devices != {"cpu"}:
        return f"coordinators move what is on CPUs, and the tables are on {sorted(devices)}: leave coordinator away"
    ranks, theirs = dist.get_process_group_ranks(group), getattr(coordinator, "ranks", None)
    if theirs != ranks:
        return f"the coordinator has ranks {theirs}, and the tables have {ranks}: make them of one group"
    return None


def _fingerprint(
    chosen: Sequence[Chosen], optimizer_class: Any, options: dict[str, Any], config: TableConfig
) -> dict[str, object]:
    from ddp_hooks import __version__

    entries: dict[str, object] = {
        "torch version": torch.__version__,
        "ddp_hooks version": __version__,
        "TableConfig": config,
        "optimizer_class": optimizer_class.__qualname__,
        "the optimizer's options": sorted(options.items()),
    }
    for one in chosen:
        places = ", ".join(place.path for place in one.places)
        padding = one.places[0].module.padding_idx
        entries[f"table {one.name}"] = f"{tuple(one.weight.shape)} {one.weight.dtype} padding {padding} as {places}"
    return entries
