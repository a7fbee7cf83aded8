"""In which order and groups gradients are selected from: what stays of it from step to step, and how it changes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hooks.comm import agree, broadcast_object, mebibytes
from ddp_hooks.topk.config import TopKConfig
from ddp_hooks.topk.groups import GradientGroup, Members, form_groups


class Grouping:
    """The groups in force. They follow the first backward, as the first rank has seen it.

    Args:
        config: the settings.
        parameters, names: those that DDP reduces, in a fixed order.
        finds_unused: note also after the first backward which parameters were used.
        planned: told the parameters of every group when they change; None: nobody is.
    """

    def __init__(
        self,
        config: TopKConfig,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        finds_unused: bool,
        planned: Callable[[list[tuple[int, ...]]], None] | None,
    ) -> None:
        self.groups: list[GradientGroup] = []
        self.mb = config.group_mb
        """The largest group, in MiB."""
        self.used: set[int] = set()
        """Parameters that were used since this was cleared, if that is noted."""
        self._config = config
        self._parameters = parameters
        self._names = names
        self._finds_unused = finds_unused
        self._planned = planned
        self._order = list(reversed(range(len(parameters))))  # most backwards go this way
        self._seen: dict[int, None] | None = {}  # parameters, as the first backward reaches them
        self._watches = [p.register_post_accumulate_grad_hook(_noting(self, i)) for i, p in enumerate(parameters)]
        self.form(self.mb)

    @property
    def is_settled(self) -> bool:
        """Whether the order is that of a backward."""
        return self._seen is None

    def order(self) -> list[str] | None:
        """The parameters' names in their order; None as long as that is not settled."""
        return [self._names[index] for index in self._order] if self.is_settled else None

    def settle(self, group: dist.ProcessGroup) -> None:
        """Take over the order that the first rank has seen, if there is none yet; collective then."""
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
        """Go on with what another run had: an order, if it was settled, and a size in MiB."""
        if order is not None:
            self._end_watch()
            index_of = {name: index for index, name in enumerate(self._names)}
            self._order = [index_of[name] for name in order]
        self.form(mb)

    def members_of(self, mb: float) -> list[Members]:
        """The groups that a size in MiB makes."""
        return form_groups(self._order, self._parameters, mebibytes(mb), self._config.dense_below_numel)

    def form(self, mb: float) -> None:
        """Form groups of this size, in MiB; what was kept moves into them."""
        self.mb = mb
        former, with_velocity = self.groups, self._config.momentum is not None
        self.groups = [
            GradientGroup.of(members, self._parameters, self._names, with_velocity) for members in self.members_of(mb)
        ]
        everyone = [(*group.members.sparse, *group.members.dense) for group in self.groups]
        if self._planned is not None:
            self._planned(everyone)
        group_of = {index: group for group, members in zip(self.groups, everyone, strict=True) for index in members}
        for group in former:
            for kind, kept in group.surrender().items():
                for index, values in kept.items():
                    group_of[index].keep(kind, index, values)

    def close(self) -> None:
        """Note nothing more."""
        for watch in self._watches:
            watch.remove()

    def _end_watch(self) -> None:
        self._seen = None
        if not self._finds_unused:
            self.close()

    def note(self, index: int) -> None:
        """A backward has reached a parameter."""
        self.used.add(index)
        if self._seen is not None:
            self._seen.setdefault(index)


def _noting(grouping: Grouping, index: int) -> Callable[[Tensor], None]:
    reference = weakref.ref(grouping)  # the collector does not see through a parameter's hooks

    def note(_: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive.note(index)

    return note
