"""How a :class:`~ddp_hooks.BucketTuner` changes which atoms travel together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ddp_hooks.comm import Lanes, LinkProfile
from ddp_hooks.dear.config import DearConfig
from ddp_hooks.dear.layout.model_layout import ModelLayout
from ddp_hooks.dear.layout.parameters import ManagedParameters
from ddp_hooks.planning.atoms import FusionRule
from ddp_hooks.tuning import Groups, Tuning, begin, job_of


class TunableFusion:
    """See :class:`~ddp_hooks.tuning.Tunable`.

    Args:
        layout: the layout whose atoms are grouped.
        regroup: puts another rule in force.
    """

    def __init__(self, layout: ModelLayout, regroup: Callable[[FusionRule], None]) -> None:
        self._layout = layout
        self._regroup = regroup

    def groups_of(self, mb: float) -> Groups:
        """Return the groups for a size: their number is that of reduce-scatters, and gathers tell sizes apart, too."""
        reduced, gathered = self._layout.groups_with(self._rule(mb))
        return Groups(len(reduced), (tuple(reduced), tuple(gathered)))

    def apply(self, mb: float) -> None:
        self._regroup(self._rule(mb))

    def _rule(self, mb: float) -> FusionRule:
        return replace(self._layout.rule, fusion="size", mb=mb)


def begin_tuning(
    config: DearConfig,
    layout: ModelLayout,
    lanes: Lanes,
    link: LinkProfile | None,
    parameters: ManagedParameters,
    bucket_bytes: int,
    regroup: Callable[[FusionRule], None],
) -> Tuning | None:
    """Begin the search that the settings ask for; return None if they ask for none. Collective."""
    if config.tuner is None:
        return None
    settings = f"{replace(config, tuner=None, trace=False)}, buckets of {bucket_bytes} bytes"
    goodput_bytes_s = link.goodput_bytes_s if link is not None else None
    job = job_of("dear", parameters.tensors, parameters.names, lanes, settings, goodput_bytes_s)
    tunable = TunableFusion(layout, regroup)
    return begin(config.tuner, tunable, lanes, layout.rule.mb, job, parameters.device)
