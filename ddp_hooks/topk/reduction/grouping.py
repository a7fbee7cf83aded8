"""Grouping: order and size of the groups of gradients, from step to step."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from ddp_hooks.comm import mebibytes, profile_link
from ddp_hooks.topk.reduction.groups import Context, GradientGroup, Members, form_groups
from ddp_hooks.tuning import Groups, Tuning, begin, job_of


class Grouping:
    """The groups in force. They follow the first backward, as the first rank has seen it.

    A :class:`~ddp_hooks.tuning.Tunable`. ``finds_unused``: note used parameters also after the first backward.
    """

    def __init__(self, context: Context, finds_unused: bool) -> None:
        self.groups: list[GradientGroup] = []
        self.mb = context.config.group_mb  # largest group, in MiB
        self.used: set[int] = set()  # parameters that were used since this was cleared, if that is noted
        self._context = context
        self._finds_unused = finds_unused
        self._order = list(reversed(range(len(context.names))))  # most backwards go this way
        self._seen: dict[int, None] | None = {}  # parameters in the order of the first backward; None: order is fixed
        this = weakref.ref(self)  # the collector does not see through a parameter's hooks
        self._watches = [
            parameter.register_post_accumulate_grad_hook(partial(_note, this, index))
            for index, parameter in enumerate(context.parameters)
        ]
        self.apply(self.mb)

    @property
    def is_fixed(self) -> bool:
        """True if the order is that of a backward."""
        return self._seen is None

    def order(self) -> list[str] | None:
        """Return the parameters' names in their order; None until it is fixed."""
        return [self._context.names[index] for index in self._order] if self.is_fixed else None

    def fix_order(self) -> None:
        """Take over the order of the first rank's backward, if none is fixed; collective then."""
        if self._seen is None:
            return
        order = [*self._seen, *(index for index in self._order if index not in self._seen)]
        what = "the groups of gradients, after the first backward"
        self._order = self._context.lanes.broadcast_object(order, what)
        self._end_watch()
        self.apply(self.mb)

    def restore(self, order: Sequence[str] | None, mb: float) -> None:
        """Take over the order of another run, if it was fixed, and its size in MiB."""
        if order is not None:
            self._end_watch()
            index_of = {name: index for index, name in enumerate(self._context.names)}
            self._order = [index_of[name] for name in order]
        self.apply(mb)

    def apply(self, mb: float) -> None:
        """Form groups of this size, in MiB; residuals and velocities move into them."""
        self.mb = mb
        former = self.groups
        self.groups = [GradientGroup.of(members, self._context) for members in self._members_of(mb)]
        group_of = {index: group for group in self.groups for index in group.members}
        for group in former:
            kept = group.kept()
            group.residual = group.velocity = None  # they go with the views
            for kind, values_of in kept.items():
                for piece, values in values_of.items():
                    group_of[piece.parameter].keep(kind, piece, values)

    def groups_of(self, mb: float) -> Groups:
        members = tuple(self._members_of(mb))
        return Groups(len(members), members)

    def note(self, index: int) -> None:
        self.used.add(index)
        if self._seen is not None:
            self._seen.setdefault(index)

    def close(self) -> None:
        for watch in self._watches:
            watch.remove()

    def _members_of(self, mb: float) -> list[Members]:
        parameters, config = self._context.parameters, self._context.config
        return form_groups(self._order, parameters, mebibytes(mb), config.dense_below_numel)

    def _end_watch(self) -> None:
        self._seen = None
        if not self._finds_unused:
            self.close()


def _note(this: weakref.ref[Grouping], index: int, _: Tensor) -> None:
    grouping = this()
    if grouping is not None:
        grouping.note(index)


def begin_tuning(context: Context, grouping: Grouping) -> Tuning | None:
    """Return the search that the settings ask for; None if there is nothing to search for. Collective."""
    tuner, lanes, parameters = context.config.tuner, context.lanes, context.parameters
    if tuner is None:
        return None
    goodput_bytes_s = profile_link(lanes).goodput_bytes_s
    settings = str(replace(context.config, tuner=None))
    job = job_of("topk", parameters, context.names, lanes, settings, goodput_bytes_s)
    return begin(tuner, grouping, lanes, grouping.mb, job, parameters[0].device)
