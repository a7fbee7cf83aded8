"""Selection of the embeddings that become tables, and reasons why some cannot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

from ddp_hooks.comm.torch_compat.compiler import has_hooks
from ddp_hooks.embedding.config import TableConfig
from ddp_hooks.embedding.module import ShardedEmbedding

MIN_ROWS = 4096  # of tables that are selected by default

Which: TypeAlias = str | nn.Module | type[nn.Module]
Place: TypeAlias = tuple[str, nn.Embedding]  # path in the model, and module


@dataclass
class Selected:
    """Weight that becomes a table.

    Args:
        places: embeddings that have it, in the order of the model.
        others: path, module and attribute of other layers that share it.
    """

    places: list[Place]
    others: list[tuple[str, nn.Module, str]]

    @property
    def name(self) -> str:
        """Path of the first embedding."""
        return self.places[0][0]

    @property
    def module(self) -> nn.Embedding:
        """The first embedding."""
        return self.places[0][1]


def select(model: nn.Module, modules: int | Which | Iterable[Which] | None) -> list[Selected]:
    """Return the weights of the embeddings that ``modules`` names, with all places that share them.

    Args:
        model: to search.
        modules: names of modules, modules, or their types; or a smallest number of rows, which leaves frozen tables
            out; None: 4096 rows.

    Raises:
        ValueError: there is no such embedding, or something that was named is no embedding.
    """
    if any(isinstance(module, ShardedEmbedding) for module in model.modules()):
        raise ValueError("the model has sharded tables already: name all of them in one call, with modules=[...]")
    paths = model.named_modules(remove_duplicate=False)
    places = [(path, module) for path, module in paths if isinstance(module, nn.Embedding) and path]
    if modules is None or isinstance(modules, int):
        min_rows = MIN_ROWS if modules is None else modules
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


def _named(places: Sequence[Place], which: Which) -> list[nn.Embedding]:
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


def find_problem(selected: Iterable[Selected], config: TableConfig) -> str | None:
    """Return why some of these weights cannot be tables, or None."""
    for one in selected:
        for path, module in one.places:
            reason = _reason_against(module)
            if reason is not None:
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
