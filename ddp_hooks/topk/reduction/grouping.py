"""Grouping: order and size of the groups of gradients, from step to step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hooks.comm import agree, broadcast_object, mebibytes
from ddp_hooks.topk.config import TopKConfig
from ddp_hooks.topk.reduction.groups import GradientGroup, Members, form_groups


class Grouping:
    """The groups in force. They follow the first backward, as the first rank has seen it.

    Args:
        config: the settings.
        parameters, names: reduced by DDP, in a fixed order.
        finds_unused: note used parameters also after the first backward.
    """

    def __init__(
        self, config: TopKConfig, parameters: Sequence[torch.nn.Parameter], names: Sequence[str], finds_unused: bool
    ) -> None:
        self.groups: list[GradientGroup] = []
        self.mb = config.group_mb  # largest group, in MiB
        self.used: set[int] = set()  # parameters that were used since this was cleared, if that is noted
        self._config = config
        self._parameters = parameters
        self._names = names
        self._finds_unused = finds_unused
        self._tell: Callable[[list[tuple[int, ...]]], None] | None = None
        self._order = list(reversed(range(len(parameters))))  # most backwards go this way
        self._seen: dict[int, None] | None = {}  # parameters in the order of the first backward; None: order is fixed
        self._watches = [p.register_post_accumulate_grad_hook(_noting(self, i)) for i, p in enumerate(parameters)]
        self.form(self.mb)

    @property
    def is_fixed(self) -> bool:
        """True if the order is that of a backward."""
        return self._seen is None

    def tell(self, listener: Callable[[list[tuple[int, ...]]], None]) -> None:
        """Call ``listener`` with the parameters of every group, now and whenever groups change."""
        self._tell = listener
        listener([group.members.all for group in self.groups])

    def order(self) -> list[str] | None:
        """Return the parameters' names in their order; None until it is fixed."""
        return [self._names[index] for index in self._order] if self.is_fixed else None

    def fix_order(self, group: dist.ProcessGroup) -> None:
        """Take over the order of the first rank's backward, if none is fixed; collective then."""
        if self._seen is None:
            return
        order = [*self._seen, *(index for index in self._order if index not in self._seen)]
        order = broadcast_object(order, group, "the groups of gradients, after the first backward", self._config)
        self._end_watch()
        self._order = order
        members = {f"group {i}": members for i, members in enumerate(self.members_of(self.mb))}
        agree(members, None, group, "the groups of gradients", self._config)
        self.form(self.mb)

    def restore(self, order: Sequence[str] | None, mb: float) -> None:
        """Take over the order of another run, if it was fixed, and its size in MiB."""
        if order is not None:
            self._end_watch()
            index_of = {name: index for index, name in enumerate(self._names)}
            self._order = [index_of[name] for name in order]
        self.form(mb)

    def members_of(self, mb: float) -> list[Members]:
        """Return the groups that a size in MiB makes."""
        return form_groups(self._order, self._parameters, mebibytes(mb), self._config.dense_below_numel)

    def form(self, mb: float) -> None:
        """Form groups of this size, in MiB; residuals and velocities move into them."""
        self.mb = mb
        former, with_velocity = self.groups, self._config.momentum is not None
        self.groups = [
            GradientGroup.of(members, self._parameters, self._names, with_velocity) for members in self.members_of(mb)
        ]
        if self._tell is not None:
            self._tell([group.members.all for group in self.groups])
        group_of = {index: group for group in self.groups for index in group.members.all}
        for group in former:
            for kind, kept in group.release().items():
                for index, values in kept.items():
                    group_of[index].keep(kind, index, values)

    def note(self, index: int) -> None:
        """Note that a backward has reached a parameter."""
        self.used.add(index)
        if self._seen is not None:
            self._seen.setdefault(index)

    def close(self) -> None:
        """Note nothing more."""
        for watch in self._watches:
            watch.remove()

    def _end_watch(self) -> None:
        self._seen = None
        if not self._finds_unused:
            self.close()


def _noting(grouping: Grouping, index: int) -> Callable[[Tensor], None]:
    reference = weakref.ref(grouping)  # the collector does not see through a parameter's hooks

    def note(_: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive.note(index)

    return note
