"""How parameters lie in memory and travel at present: the layout in force, the atoms' memory, and the groups.

The layout follows DDP's buckets. Groups are formed twice over the same atoms: in the order of the backward for
reduce-scatters (:class:`Schedule`), and in the order of the forward for gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_hooks.comm import Partition, see, torch_compat
from ddp_hooks.dear.layout import Atom, FusionRule, Layout, ParameterShape, cut_bucket, fuse
from ddp_hooks.dear.moves import State
from ddp_hooks.dear.storage import flatten, unflatten
from ddp_hooks.overlap import take_back


class Schedule:
    """Groups of atoms of a layout in force, in the order of the backward."""

    def __init__(self, layout: Layout, groups: Sequence[tuple[int, ...]]) -> None:
        self.layout = layout
        self.groups = list(groups)


class Arrangement:
    """The layout in force and what follows from it; changes where ``parameters`` lie.

    Args:
        parameters: the parameters that are reduced, in a fixed order.
        names: their names, for messages.
        root: the module inside DDP, for which parameters belong to one layer.
        world_size: of the group.
        rule: which atoms travel together; may be replaced before :meth:`plan`.
        atom_bytes: size at which buckets and parameters are cut.
        cuts_tail: cut the last bucket finer, because its parts may travel before it is complete.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        root: torch.nn.Module,
        world_size: int,
        rule: FusionRule,
        atom_bytes: int,
        cuts_tail: bool,
    ) -> None:
        self.rule = rule
        self.schedule: Schedule | None = None  # None until the first step
        self.flats: list[Tensor] = []  # per atom, (numel,): the memory of its parameters
        self.gather_groups: list[tuple[int, ...]] = []  # of atoms, in the order of the forward
        self.gather_labels: list[str] = []
        self._parameters = parameters
        self._names = names
        self._shapes = _parameter_shapes(root, parameters)
        self._world_size = world_size
        self._atom_bytes = atom_bytes
        self._cuts_tail = cuts_tail
        self._atoms_by_need: list[int] = []  # of the layout in force
        self._memory: list[Tensor] = []  # per parameter, where its values should be

    @property
    def layout(self) -> Layout | None:
        """The layout in force; None until the first step."""
        return self.schedule.layout if self.schedule is not None else None

    def move_parameters(self, layout: Layout) -> None:
        """Make the parameters of every atom neighbours in memory."""
        self._memory = []  # so that what moves is not kept
        if self.layout is not None:
            unflatten(self.layout, self._parameters, self.flats)
        self.flats = flatten(layout, self._parameters)
        self._memory = [parameter.detach() for parameter in self._parameters]

    def plan(self, layout: Layout, order_of_need: Callable[[], Sequence[int]]) -> list[tuple[int, ...]]:
        """Form the groups; returns the parameters of every group of gathers.

        Args:
            layout: the one in force from now on, in whose memory the parameters are.
            order_of_need: tells when every parameter is needed, the same on every rank.
        """
        self.schedule = Schedule(layout, self._fused_in_order(layout.atoms, self.rule))
        needed = order_of_need()
        first_need = [min(needed[member.parameter] for member in atom.members) for atom in layout.atoms]
        # Ties, and what no forward has shown, in the reverse of the backward.
        self._atoms_by_need = sorted(range(len(layout.atoms)), key=lambda i: (first_need[i], -i))
        groups = self.gather_groups = fuse(self._atoms_by_need, layout.atoms, self._shapes, self.rule)
        self.gather_labels = [
            f"group {number} ({self.label([layout.atoms[i] for i in group])})" for number, group in enumerate(groups)
        ]
        return [tuple(dict.fromkeys(m.parameter for i in group for m in layout.atoms[i].members)) for group in groups]

    def groups_with(self, rule: FusionRule) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """The groups of reduce-scatters and of gathers that another rule would make, of the layout in force."""
        assert self.layout is not None
        atoms = self.layout.atoms
        return self._fused_in_order(atoms, rule), fuse(self._atoms_by_need, atoms, self._shapes, rule)

    def gathers(self, memory: Sequence[Tensor]) -> list[list[Partition]]:
        """What travels when the atoms' ``memory`` is gathered, per group."""
        assert self.layout is not None
        atoms = self.layout.atoms
        return [[Partition(memory[i], atoms[i].bounds) for i in group] for group in self.gather_groups]

    def cut(self, position: int, parameters: tuple[int, ...], is_last: bool) -> list[Atom]:
        """The atoms of a bucket, given by its position, its parameters and whether it is the last."""
        known = self.layout
        if known is not None and position < len(known.buckets) and known.buckets[position] == parameters:
            return [atom for atom in known.atoms if atom.bucket == position]
        tail = is_last and position > 0 and self._cuts_tail
        return cut_bucket(position, parameters, self._shapes, self._world_size, self._atom_bytes, tail)

    def fuse_in_order(self, atoms: Sequence[Atom]) -> list[tuple[int, ...]]:
        """Group atoms in the order in which they come; those of the tail travel alone."""
        return self._fused_in_order(atoms, self.rule)

    def _fused_in_order(self, atoms: Sequence[Atom], rule: FusionRule) -> list[tuple[int, ...]]:
        tail = next((index for index, atom in enumerate(atoms) if atom.tail), len(atoms))
        return fuse(range(tail), atoms, self._shapes, rule) + [(index,) for index in range(tail, len(atoms))]

    def label(self, atoms: Sequence[Atom]) -> str:
        """A short name for a group of atoms, for messages."""
        members = [member for atom in atoms for member in atom.members]
        others = len({member.parameter for member in members}) - 1
        return self._names[members[0].parameter] + (f" and {others} more" if others else "")

    def refuse_replaced_storage(self) -> None:
        """Raise RuntimeError if a parameter has other memory than it was given."""
        for index in self._in_other_memory():
            raise RuntimeError(
                f"the memory of {self._names[index]} was replaced (by .to() or .data = ...), so the optimizer "
                f"would update memory that the model no longer reads: convert the model before wrapping it"
                f"{see('storage-was-replaced')}"
            )

    def take_back_memory(self, states: Mapping[Any, State]) -> None:
        """The optimizer has stepped on parameters and may have assigned ``.data``: bring the values where they were."""
        for index in self._in_other_memory():
            parameter, memory = self._parameters[index], self._memory[index]
            take_back(parameter, memory, states.get(parameter))
            parameter.data = memory

    def _in_other_memory(self) -> list[int]:
        with torch_compat.without_overrides():
            return [i for i, own in enumerate(self._memory) if self._parameters[i].data_ptr() != own.data_ptr()]


def _parameter_shapes(root: torch.nn.Module, parameters: Sequence[torch.nn.Parameter]) -> list[ParameterShape]:
    layer_of: dict[int, int] = {}
    for layer, module in enumerate(root.modules()):
        for parameter in module.parameters(recurse=False):
            layer_of.setdefault(id(parameter), layer)
    return [ParameterShape(p.numel(), p.element_size(), layer_of[id(p)]) for p in parameters]
