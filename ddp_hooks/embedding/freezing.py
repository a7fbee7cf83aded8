"""Tables that are frozen after they were split, as other layers are: with ``requires_grad_()`` of a module around them.

A table's weight is no parameter of its module, so loops over parameters do not reach it. Where such a loop has frozen
everything around a table, it was probably meant, too, and nobody can know: training refuses to go on.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ddp_hooks.comm import see
from ddp_hooks.embedding.module import ShardedEmbedding
from ddp_hooks.embedding.table import Table


@dataclass
class _Surroundings:
    """The nearest module around a table that has other parameters, and those of them that were trained."""

    name: str
    parameters: list[weakref.ref[nn.Parameter]]


class Freezing:
    """Lets ``requires_grad_()`` of modules reach the tables below them, and looks for what does not.

    Args:
        tables: the tables.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = tables
        self._around: dict[int, _Surroundings] = {}  # by table, as long as nobody has said what is meant

    def watch(self, root: nn.Module) -> None:
        """Tables stand in the model now, below ``root``."""
        paths = dict(root.named_modules(remove_duplicate=False))
        for path, module in paths.items():
            if isinstance(module, ShardedEmbedding):
                ancestors = [paths[path[:end]] for end in _ends_of_ancestors(path)]
                for ancestor in ancestors:
                    _pass_on(ancestor)
                self._around.setdefault(module.index, _surroundings_of(ancestors, root))

    def set(self, index: int, requires_grad: bool) -> None:
        """Train a table from now on, or not."""
        self._tables[index].weight.requires_grad_(requires_grad)
        self._around.pop(index, None)

    def refuse_doubt(self) -> None:
        """Raise RuntimeError if everything around a table was frozen, and nobody has said what is to become of it."""
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


def _ends_of_ancestors(path: str) -> list[int]:
    """Where the paths of the modules around one end in its own, the nearest first."""
    return [*reversed([end for end, letter in enumerate(path) if letter == "."]), 0] if path else []


def _surroundings_of(ancestors: Sequence[nn.Module], root: nn.Module) -> _Surroundings:
    for ancestor in ancestors:
        trained = [weakref.ref(parameter) for parameter in ancestor.parameters() if parameter.requires_grad]
        if trained:
            return _Surroundings("the model" if ancestor is root else type(ancestor).__name__, trained)
    return _Surroundings("", [])


def _pass_on(module: nn.Module) -> None:
    """Let ``module.requires_grad_()`` freeze the tables below it."""
    if "requires_grad_" in vars(module):
        return
    reference = weakref.ref(module)

    def requires_grad_(requires_grad: bool = True) -> Any:
        present = reference()
        assert present is not None
        for below in present.modules():
            if isinstance(below, ShardedEmbedding):
                below.requires_grad_(requires_grad)
        return nn.Module.requires_grad_(present, requires_grad)

    module.requires_grad_ = requires_grad_  # type: ignore[method-assign]
