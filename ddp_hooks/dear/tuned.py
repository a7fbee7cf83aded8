"""What a :class:`~ddp_hooks.BucketTuner` turns of DeAR: which atoms travel together, and on how many lanes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ddp_hooks.comm import Lanes, LinkProfile
from ddp_hooks.dear.arrangement import Arrangement
from ddp_hooks.dear.config import DearConfig
from ddp_hooks.dear.layout import FusionRule
from ddp_hooks.tuning import Groups, Setting, Tuning, begin, job_of


class DearKnob:
    """See :class:`~ddp_hooks.tuning.Knob`.

    Args:
        arrangement: the layout whose atoms are grouped.
        lanes: of which some may be left idle.
        regroup: puts another rule in force.
    """

    def __init__(self, arrangement: Arrangement, lanes: Lanes, regroup: Callable[[FusionRule], None]) -> None:
        self._arrangement = arrangement
        self._lanes = lanes
        self._regroup = regroup

    def groups_of(self, mb: float) -> Groups:
        """Those of the reduce-scatters count; that gathers' may differ, too, makes a difference."""
        reduced, gathered = self._arrangement.groups_with(self._rule(mb))
        return Groups(len(reduced), (tuple(reduced), tuple(gathered)))

    def turn(self, setting: Setting) -> None:
        """See :class:`~ddp_hooks.tuning.Knob`."""
        self._regroup(self._rule(setting.mb))
        self._lanes.use(setting.lanes)

    def _rule(self, mb: float) -> FusionRule:
        return replace(self._arrangement.rule, fusion="size", mb=mb)


def begin_tuning(
    config: DearConfig,
    arrangement: Arrangement,
    lanes: Lanes,
    link: LinkProfile | None,
    parameters: Sequence[torch.nn.Parameter],
    names: Sequence[str],
    bucket_bytes: int,
    regroup: Callable[[FusionRule], None],
) -> Tuning | None:
    """The search that the settings ask for; None if there is nothing to search for. Collective."""
    if config.tuner is None:
        return None
    settings = f"{replace(config, tuner=None, trace=False)}, buckets of {bucket_bytes} bytes"
    goodput_bytes_s = link.goodput_bytes_s if link is not None else None
    job = job_of("dear", parameters, names, lanes, settings, goodput_bytes_s)
    knob = DearKnob(arrangement, lanes, regroup)
    return begin(config.tuner, knob, lanes, arrangement.rule.mb, job, parameters[0].device)
