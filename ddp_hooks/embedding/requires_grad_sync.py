"""Frozen tables.

``requires_grad_()`` of modules reaches the tables inside them, but loops over parameters do not: a table's weight is no
parameter of its module. If such a loop has frozen everything around a table, the user may have meant the table, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from ddp_hooks.comm import see
from ddp_hooks.embedding.table import Table


class _Surroundings(NamedTuple):
    """Nearest module around a table with other trained parameters, and these parameters."""

    name: str
    parameters: list[weakref.ref[nn.Parameter]]


class RequiresGradSync:
    """Trains and freezes tables, and refuses loops that leave tables out."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = tables
        self._around: dict[int, _Surroundings] = {}  # by table, until the user sets requires_grad of the table itself

    def attach(self, root: nn.Module) -> None:
        """Note what is trained around the tables, which are in ``root`` now."""
        for table in self._tables:
            names = table.name.split(".")
            around = [root.get_submodule(".".join(names[:end])) for end in reversed(range(len(names)))]
            self._around[table.index] = _surroundings_among(around, root)

    def set(self, index: int, requires_grad: bool) -> None:
        self._tables[index].weight.requires_grad_(requires_grad)
        self._around.pop(index, None)

    def refuse_ambiguous(self) -> None:
        """Raise ``RuntimeError`` if everything around a table was frozen, and the user did not say if the table is."""
        for index, around in self._around.items():
            name, weight = self._tables[index].name, self._tables[index].weight
            alive = [parameter for reference in around.parameters if (parameter := reference()) is not None]
            if alive and weight.requires_grad and not any(parameter.requires_grad for parameter in alive):
                raise RuntimeError(
                    f"all parameters of {around.name} were frozen since shard_embeddings(), and a loop over parameters "
                    f"does not reach the sharded table {name}, which is no parameter of its module: call "
                    f'tables.requires_grad_(False, ["{name}"]) on all ranks to freeze it, too, or '
                    f'tables.requires_grad_(True, ["{name}"]) to go on training it'
                    f"{see('set-up-changed-later')}"
                )


def _surroundings_among(modules: Sequence[nn.Module], root: nn.Module) -> _Surroundings:
    for module in modules:
        trained = [weakref.ref(parameter) for parameter in module.parameters() if parameter.requires_grad]
        if trained:
            return _Surroundings("the model" if module is root else type(module).__name__, trained)
    return _Surroundings("", [])
