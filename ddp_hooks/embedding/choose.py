"""Which embeddings become tables, and why some cannot."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, nn

from ddp_hooks.embedding.config import TableConfig
from ddp_hooks.embedding.module import ShardedEmbedding

MIN_ROWS = 4096  # of what is chosen by default

Which: TypeAlias = str | nn.Module | type[nn.Module]


@dataclass
class Place:
    """A module in the model."""

    path: str
    parent: nn.Module
    attribute: str
    module: nn.Embedding


@dataclass
class Chosen:
    """A weight that becomes a table.

    Args:
        places: of the embeddings that have it, in the order of the model.
        others: other layers that share it: module and attribute.
    """

    places: list[Place]
    others: list[tuple[str, nn.Module, str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The first one's."""
        return self.places[0].path

    @property
    def weight(self) -> Tensor:
        """(num_rows, dim), a parameter."""
        return self.places[0].module.weight


def choose(model: nn.Module, modules: int | Which | Iterable[Which] | None) -> list[Chosen]:
    """The weights that are meant, with all places that share them, in the order of the model.

    Args:
        model: to search.
        modules: names of modules, modules, or their types; or how many rows they have at least; None: 4096, frozen
            ones left out.

    Raises:
        ValueError: there is none, or something that was named is no embedding.
    """
    if any(isinstance(module, ShardedEmbedding) for module in model.modules()):
        raise ValueError("the model has sharded tables already: name all of them in one call, with modules=[...]")
    places = _embeddings(model)
    if modules is None or isinstance(modules, int):
        min_rows = MIN_ROWS if modules is None else modules
        wanted = [p for p in places if p.module.num_embeddings >= min_rows and p.module.weight.requires_grad]
        looked_for = f"nn.Embedding with at least {min_rows} rows that is trained"
    else:
        names = [modules] if isinstance(modules, str | nn.Module | type) else list(modules)
        wanted = [place for which in names for place in _meant(model, places, which)]
        looked_for = f"nn.Embedding among {names}"
    if not wanted:
        found = ", ".join(f"{p.path} ({p.module.num_embeddings} rows)" for p in places) or "none at all"
        raise ValueError(f"the model has no {looked_for}; its embeddings: {found}. Name some with modules=[...]")
    weights = {id(place.module.weight): place.module.weight for place in wanted}
    chosen = []
    for key, weight in weights.items():
        sharing = [place for place in places if place.module.weight is weight]
        embeddings = {id(place.module) for place in sharing}
        others = [
            (path, module, attribute)
            for path, module in model.named_modules()
            if id(module) not in embeddings
            for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
            if id(parameter) == key
        ]
        chosen.append(Chosen(sharing, others))
    return chosen


def find_problem(chosen: Iterable[Chosen], config: TableConfig) -> str | None:
    """Why the first of these that cannot be a table cannot; None if all can."""
    for one in chosen:
        for place in one.places:
            reason = _reason_against(place.module)
            if reason is not None:
                return f"{place.path} cannot be sharded: {reason}"
        if len({place.module.padding_idx for place in one.places}) > 1:
            names = ", ".join(place.path for place in one.places)
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


def _embeddings(model: nn.Module) -> list[Place]:
    places = []
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Embedding) and path:
            parent, _, attribute = path.rpartition(".")
            places.append(Place(path, model.get_submodule(parent), attribute, module))
    return places


def _meant(model: nn.Module, places: list[Place], which: Any) -> list[Place]:
    if isinstance(which, str):
        meant = [place for place in places if place.path == which or place.path.endswith(f".{which}")]
    elif isinstance(which, type):
        meant = [place for place in places if type(place.module) is which]
    else:
        meant = [place for place in places if place.module is which]
    if not meant:
        names = ", ".join(place.path for place in places) or "none"
        raise ValueError(f"modules has {which!r}, which is no nn.Embedding of the model; there are: {names}")
    return meant


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
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    if any(hooks):
        return "it has hooks, which would be lost: register them afterwards"
    return None
