"""DeAR as its paper has it: whole tensors, in groups that travel in one piece, and all updates on every worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddp_hooks.planning import Dear
from ddp_hooks.planning.atoms import Atom, FusionRule
from ddp_hooks.planning.events import Slice
from ddp_hooks.planning.network import Phase
from ddp_hooks.planning.simulation import Run
from ddp_hooks.planning.strategies.dear import Sizes, Update


@dataclass(frozen=True)
class DearOfPaper(Dear):
    """DeAR with groups that travel in one piece of whole tensors; the hook moves atom after atom."""

    update: Update = "replicated"
    #: Largest group, in layers instead (section VI-G); tensors that are read at once are one layer.
    fusion_layers: int | None = None
    halves: tuple[Phase, ...] = ("reduce-scatter", "all-gather")  #: take their time, others take none (Fig. 8)

    def collective(self, run: Run, phase: Phase, group: Sequence[Atom], message_bytes: int) -> list[Slice]:
        num_bytes = sum(atom.nbytes for atom in group)
        return run.collective(phase, num_bytes, message_bytes) if phase in self.halves else []

    def sizes(self, run: Run) -> Sizes:
        sizes = super().sizes(run)
        largest_bytes = max(tensor.num_bytes for tensor in run.step.tensors)
        rule = sizes.rule if self.fusion_layers is None else FusionRule("layers", 0.0, self.fusion_layers)
        return sizes._replace(atom_bytes=max(sizes.atom_bytes, largest_bytes), rule=rule)
