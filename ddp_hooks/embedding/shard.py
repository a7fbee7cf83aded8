"""Sharding of a model's embeddings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from ddp_hooks.comm import agree
from ddp_hooks.comm.torch_compat.compiler import has_hooks
from ddp_hooks.embedding.config import TableConfig
from ddp_hooks.embedding.exchange.channels import Channels, CoordinatedChannels, Exchanger
from ddp_hooks.embedding.module import ShardedEmbedding
from ddp_hooks.embedding.step.split_step import problem_of_optimizer
from ddp_hooks.embedding.table import Selected, Table, column_bounds
from ddp_hooks.embedding.tables import EmbeddingTables

_MIN_ROWS = 4096  # of tables that are selected by default

Which: TypeAlias = str | nn.Module | type[nn.Module]


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
    problem = problem_of_optimizer(optimizer_class, optimizer_options)
    if problem is None:
        try:
            selected = _select(model, modules)
            problem = _problem_of_selection(selected, config) or _problem_of_devices(selected, coordinator, group)
        except ValueError as error:
            problem = str(error)
    entries = _fingerprint(selected, optimizer_class, optimizer_options, config) if problem is None else {}
    entries["coordinator"] = coordinator is not None
    agree(entries, problem, group, "the set-up of shard_embeddings", config)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    tables = []
    for index, one in enumerate(selected):
        module, bounds = one.module, column_bounds(one.module.embedding_dim, world_size)
        own = module.weight.new_empty(module.num_embeddings, bounds[rank + 1] - bounds[rank])
        aliases = tuple(path for path, _ in one.places[1:])
        shape = module.num_embeddings, module.embedding_dim
        tables.append(Table(index, one.name, aliases, *shape, bounds, rank, nn.Parameter(own), module.padding_idx))
    optimizer = optimizer_class([(table.name, table.weight) for table in tables], **optimizer_options)
    if coordinator is None:
        channels = Channels(group, config, tables)
    else:
        channels = CoordinatedChannels(group, config, tables, coordinator)
    result = EmbeddingTables(model, tables, optimizer, channels)
    result.replace(selected)
    return result


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


def _select(model: nn.Module, modules: int | Which | Iterable[Which] | None) -> list[Selected]:
    """Return the weights of the embeddings that ``modules`` names, with all places that share them."""
    if any(isinstance(module, ShardedEmbedding) for module in model.modules()):
        raise ValueError("the model has sharded tables already: name all of them in one call, with modules=[...]")
    paths = model.named_modules(remove_duplicate=False)
    places = [(path, module) for path, module in paths if isinstance(module, nn.Embedding) and path]
    if modules is None or isinstance(modules, int):
        min_rows = _MIN_ROWS if modules is None else modules
        wanted = [m for _, m in places if m.num_embeddings >= min_rows and m.weight.requires_grad]
        looked_for = f"nn.Embedding with at least {min_rows} rows that is trained"
    else:
        names = [modules] if isinstance(modules, str | nn.Module | type) else list(modules)
        wanted = [module for which in names for module in _named(places, which)]
        looked_for = f"nn.Embedding among {names}"
    if not wanted:
        found = ", ".join(f"{path} ({module.num_embeddings} rows)" for path, module in places) or "none at all"
        raise ValueError(f"the model has no {looked_for}; its embeddings: {found}. Name some with modules=[...]")
    selected = []
    for weight in {id(module.weight): module.weight for module in wanted}.values():
        sharing = [place for place in places if place[1].weight is weight]
        embeddings = {id(module) for _, module in sharing}
        others = [
            (path, module, attribute)
            for path, module in model.named_modules()
            if id(module) not in embeddings
            for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
            if parameter is weight
        ]
        selected.append(Selected(sharing, others))
    return selected


def _named(places: Sequence[tuple[str, nn.Embedding]], which: Which) -> list[nn.Embedding]:
    if isinstance(which, str):
        found = [module for path, module in places if path == which or path.endswith(f".{which}")]
    elif isinstance(which, type):
        found = [module for _, module in places if type(module) is which]
    else:
        found = [module for _, module in places if module is which]
    if not found:
        names = ", ".join(path for path, _ in places) or "none"
        raise ValueError(f"modules has {which!r}, which is no nn.Embedding of the model; there are: {names}")
    return found


def _problem_of_selection(selected: Iterable[Selected], config: TableConfig) -> str | None:
    for one in selected:
        for path, module in one.places:
            if (reason := _reason_against(module)) is not None:
                return f"{path} cannot be sharded: {reason}"
        if len({module.padding_idx for _, module in one.places}) > 1:
            names = ", ".join(path for path, _ in one.places)
            return f"{names} share a weight, but have different padding_idx: give them the same"
        if one.others and not config.untie:
            names = " and ".join(f"{path}.{attribute}" for path, _, attribute in one.others)
            return (
                f"{one.name}.weight is also {names}, which reads all of it and has a gradient for all rows in every "
                f"step, so nothing can be sparse: untie them in the model (tie_word_embeddings=False), or let "
                f"TableConfig(untie=True) give the other layer a weight of its own, or leave this table out with "
                f"modules=[...]"
            )
    return None


def _reason_against(module: nn.Embedding) -> str | None:
    if type(module).forward is not nn.Embedding.forward:
        return f"{type(module).__name__} has a forward of its own, which would be lost"
    if module.max_norm is not None:
        return "max_norm changes rows in the forward, of which every rank has some columns only: leave it out"
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq counts ids on each rank by itself: leave it out"
    if not module.weight.requires_grad:
        return "its weight is frozen, so there is no gradient to exchange: leave it as it is"
    if module.weight.is_meta:
        return "its weight is on the meta device: materialise the model first"
    if not module.weight.is_floating_point():
        return f"its weight is {module.weight.dtype}"
    if has_hooks(module):
        return "it has hooks, which would be lost: register them afterwards"
    return None
