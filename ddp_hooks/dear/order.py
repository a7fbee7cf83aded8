"""The order in which a run has added gradients, for a run that resumes it.

A ring adds the ranks' gradients of an element in an order that begins behind the element's owner, other collectives in
other orders, and floating-point sums depend on them. Who owns what follows DDP's buckets, and those of the first
backward after a start are not yet those of later ones. So a checkpoint says how its run owned parameters and by which
collectives it added, and the first backward of a resumed run adds in that order, by another route: every rank sends its
gradients straight to their present owner. Same bytes, same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ddp_hooks.comm import Collective, CollectiveRule, Lanes, Partition, Segment, Work, ordered_reduce_scatter
from ddp_hooks.comm.exchange import Algorithm
from ddp_hooks.dear.layout import Atom, Layout, ParameterShape, cut_bucket

ORDER_KEY = "ddp_hooks.order"  # in the first group of a full state_dict: an optimizer keeps what groups have there


@dataclass(frozen=True)
class SumOrder:
    """Who owned what: DDP's buckets, and how they were cut.

    Args:
        world_size: number of ranks.
        atom_bytes: size at which buckets and parameters were cut.
        cuts_tail: whether the last bucket was cut finer.
        buckets: of parameters, by their index.
        rule: which collective moved what.
    """

    world_size: int
    atom_bytes: int
    cuts_tail: bool
    buckets: tuple[tuple[int, ...], ...]
    rule: CollectiveRule

    def packed(self) -> dict[str, Any]:
        """As what ``torch.load(weights_only=True)`` loads."""
        return {**vars(self), "buckets": [list(bucket) for bucket in self.buckets], "rule": asdict(self.rule)}

    @staticmethod
    def unpacked(content: Mapping[str, Any]) -> SumOrder:
        """The reverse of :meth:`packed`."""
        buckets = tuple(tuple(bucket) for bucket in content["buckets"])
        return SumOrder(**{**content, "buckets": buckets, "rule": CollectiveRule(**content.get("rule", {}))})

    def added_to(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A full ``state_dict`` that says this order; plain DDP loads it, and keeps the order for whoever asks."""
        first, *others = state_dict["param_groups"]
        return {**state_dict, "param_groups": [{**first, ORDER_KEY: self.packed()}, *others]}

    @staticmethod
    def taken_from(state_dict: dict[str, Any]) -> tuple[SumOrder | None, dict[str, Any]]:
        """The order that a full ``state_dict`` says, and the ``state_dict`` without it."""
        rest = {**state_dict, "param_groups": [dict(group) for group in state_dict["param_groups"]]}
        earlier = rest.pop(ORDER_KEY, None)  # where earlier versions have put it
        order = take_order(rest["param_groups"])
        return (SumOrder.unpacked(earlier) if earlier is not None else order), rest

    def fits(self, num_parameters: int, world_size: int) -> bool:
        """Whether it is one of these parameters and ranks."""
        indices = sorted(index for bucket in self.buckets for index in bucket)
        return (
            self.world_size == world_size
            and world_size % self.rule.node_size == 0
            and indices == list(range(num_parameters))
        )

    def layout(self, shapes: Sequence[ParameterShape]) -> Layout:
        """The layout that this amounts to, for parameters of these shapes."""
        last = len(self.buckets) - 1
        atoms = [
            atom
            for position, bucket in enumerate(self.buckets)
            for atom in cut_bucket(
                position, bucket, shapes, self.world_size, self.atom_bytes, self.cuts_tail and position == last > 0
            )
        ]
        return Layout(self.buckets, tuple(atoms))


def take_order(groups: Iterable[dict[str, Any]]) -> SumOrder | None:
    """Remove the order that an optimizer's groups say, in place; return it, or None if they say none."""
    found = [group.pop(ORDER_KEY) for group in groups if ORDER_KEY in group]
    return SumOrder.unpacked(found[-1]) if found else None


class OrderedSums:
    """Reduce-scatters that add in the order of an earlier layout, and of the collectives by which ``lanes`` move."""

    def __init__(self, earlier: Layout, lanes: Lanes) -> None:
        self._lanes = lanes
        self._owners: dict[int, list[tuple[int, int, int, Collective]]] = {}  # (start, end, rank, ...) by parameter
        for rank in range(lanes.world_size):
            for index, (parameter, start, end, _) in earlier.owned(rank):
                collective = lanes.rule.collective_of(earlier.atoms[index].numel)
                self._owners.setdefault(parameter, []).append((start, end, rank, collective))

    def reduce_scatter(self, atoms: Sequence[Atom], partitions: Sequence[Partition], label: str) -> Work:
        """As :meth:`Lanes.reduce_scatter` of the atoms' memory, divided by the number of ranks."""
        return self._lanes.run(self._run(atoms, partitions), label)

    def _run(self, atoms: Sequence[Atom], partitions: Sequence[Partition]) -> Algorithm:
        for atom, partition in zip(atoms, partitions, strict=True):
            segments = self._segments(atom)
            yield from ordered_reduce_scatter(partition, self._lanes.rank, segments, self._lanes.rule.node_size)

    def _segments(self, atom: Atom) -> list[Segment]:
        """This rank's range of the atom, cut where the owner changed."""
        low = atom.bounds[self._lanes.rank]
        segments = []
        for parameter, start, end, offset in atom.owned(self._lanes.rank):
            for first, last, owner, collective in self._owners[parameter]:
                begin, stop = max(first, start), min(last, end)
                if begin < stop:
                    position = offset - low + begin - start
                    segments.append(Segment(position, position + stop - begin, owner, collective))
        return segments
