"""TunableGroups: how a :class:`~ddp_hooks.BucketTuner` changes the size of the groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from ddp_hooks.comm import Lanes, profile_link
from ddp_hooks.topk.config import TopKConfig
from ddp_hooks.topk.reduction.grouping import Grouping
from ddp_hooks.tuning import Groups, Setting, Tuning, begin, job_of


class TunableGroups:
    """Groups in force, and lanes of which some may be left idle; a :class:`~ddp_hooks.tuning.Tunable`."""

    def __init__(self, grouping: Grouping, lanes: Lanes) -> None:
        self._grouping = grouping
        self._lanes = lanes

    def groups_of(self, mb: float) -> Groups:
        members = tuple(self._grouping.members_of(mb))
        return Groups(len(members), members)

    def apply(self, setting: Setting) -> None:
        self._grouping.form(setting.mb)
        self._lanes.use(setting.lanes)


def begin_tuning(
    config: TopKConfig, lanes: Lanes, parameters: Sequence[Tensor], names: Sequence[str], grouping: Grouping
) -> Tuning | None:
    """Return the search that the settings ask for; None if there is nothing to search for. Collective."""
    if config.tuner is None:
        return None
    goodput_bytes_s = profile_link(lanes).goodput_bytes_s
    settings = str(replace(config, tuner=None))
    job = job_of("topk", parameters, names, lanes, settings, goodput_bytes_s)
    return begin(config.tuner, TunableGroups(grouping, lanes), lanes, grouping.mb, job, parameters[0].device)
