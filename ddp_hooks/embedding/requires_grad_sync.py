"""``requires_grad_()`` of modules reaches the tables inside them, as it reaches other layers.

A table's weight is no parameter of its module, so loops over parameters do not reach it. If such a loop has frozen
everything around a table, the user may have meant the table, too: training refuses to go on.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from torch import nn

from ddp_hooks.comm import see
from ddp_hooks.embedding.table import Table


class _Surroundings(NamedTuple):
    """Nearest module around a table with other trained parameters, and these parameters."""

    name: str
    parameters: list[weakref.ref[nn.Parameter]]


class RequiresGradSync:
    """Passes ``requires_grad_()`` of modules on to tables, and refuses loops that leave tables out."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = tables
        self._around: dict[int, _Surroundings] = {}  # by table, until the user sets requires_grad of the table

    def attach(self, root: nn.Module) -> None:
        """Extend ``requires_grad_()`` of every module between ``root`` and a table."""
        inside: dict[nn.Module, set[int]] = defaultdict(set)  # tables in a module
        for table in self._tables:
            for path in (table.name, *table.aliases):
                names = path.split(".")
                around = [root.get_submodule(".".join(names[:end])) for end in reversed(range(len(names)))]
                for module in around:
                    inside[module].add(table.index)
                self._around.setdefault(table.index, _surroundings_among(around, root))
        for module, indices in inside.items():
            self._extend_requires_grad(module, indices)

    def set(self, index: int, requires_grad: bool) -> None:
        """Train or freeze a table from now on."""
        self._tables[index].weight.requires_grad_(requires_grad)
        self._around.pop(index, None)

    def refuse_ambiguous(self) -> None:
        """Raise ``RuntimeError`` if everything around a table was frozen, and the user did not say if the table is."""
        for index, around in self._around.items():
            alive = [parameter for reference in around.parameters if (parameter := reference()) is not None]
            if alive and not any(parameter.requires_grad for parameter in alive):
                name = self._tables[index].name
                raise RuntimeError(
                    f"all parameters of {around.name} were frozen since shard_embeddings(), and a loop over parameters "
                    f"does not reach the sharded table {name}, which is no parameter of its module: call "
                    f'tables.requires_grad_(False, ["{name}"]) on all ranks to freeze it, too, or '
                    f'tables.requires_grad_(True, ["{name}"]) to go on training it'
                    f"{see('set-up-changed-later')}"
                )

    def _extend_requires_grad(self, module: nn.Module, indices: Collection[int]) -> None:
        reference = weakref.ref(module)

        def requires_grad_(requires_grad: bool = True) -> Any:
            for index in indices:
                self.set(index, requires_grad)
            present = reference()
            assert present is not None
            return nn.Module.requires_grad_(present, requires_grad)

        module.requires_grad_ = requires_grad_  # type: ignore[method-assign]


def _surroundings_among(modules: Sequence[nn.Module], root: nn.Module) -> _Surroundings:
    for module in modules:
        trained = [weakref.ref(parameter) for parameter in module.parameters() if parameter.requires_grad]
        if trained:
            return _Surroundings("the model" if module is root else type(module).__name__, trained)
    return _Surroundings("", [])
