"""Gathers in 16 bits: which parameters they round, and how all ranks get the owners' values when one is read whole."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn

from ddp_hooks.comm import LaneError, Lanes, LaneTimeout, Patience, Work, gather_objects, see
from ddp_hooks.dear.config import DearConfig
from ddp_hooks.dear.layout.memory import ManagedParameters
from ddp_hooks.dear.layout.model_layout import ModelLayout
from ddp_hooks.overlap import Rounded

logger = logging.getLogger("ddp_hooks")

_CALL = "a read of rounded parameters outside of torch.autocast (gather_dtype)"
_WARN_S = 5.0  # after which a rank that reads alone says so


class Rounding:
    """Rounds in gathers what the first forward has read only through autocast's casts, on all ranks."""

    def __init__(
        self, config: DearConfig, parameters: ManagedParameters, lanes: Lanes, layout: ModelLayout
    ) -> None:
        assert config.gather_dtype is not None
        self.rounded = Rounded(config.gather_dtype, parameters.device.type, self._gather_whole)
        self._dtype = config.gather_dtype
        self._parameters = parameters
        self._lanes = lanes
        self._layout = layout
        self._patience = Patience(config.timeout_s, min(config.stall_warning_s, _WARN_S))
        self._may_round = {i for i, parameter in enumerate(parameters.tensors) if _may_round(parameter)}
        self._num_gathers = 0
        self._has_given_up = False
        self._has_warned = False
        self._latest_reader: int | None = None

    def choose(self) -> None:
        """Round what all ranks have read through casts only; collective, after every new plan of groups."""
        own = self.rounded.candidates & self._may_round
        agreed = set.intersection(*self._lanes.gather_objects(own, "the layout of buckets, in backward"))
        self._layout.round(frozenset() if self._has_given_up else agreed, self._dtype)
        self.rounded.count_anew()
        if not agreed and not self._has_warned and self._lanes.rank == 0:
            self._has_warned = True
            logger.warning(
                "gather_dtype rounds nothing: the first forward in training has read no float32 parameter under "
                "torch.autocast(%r, dtype=%s) alone, outside of compiled code",
                self._parameters.device.type,
                self._dtype,
            )

    def begin_gathers(self) -> frozenset[int]:
        """Return the parameters that the gathers of a step round; none any more where that saves nothing."""
        self._num_gathers += 1
        if self.rounded.is_in_vain and not self._has_given_up:
            self._has_given_up = True
            self._layout.round(frozenset(), self._dtype)
            if self._lanes.rank == 0:
                logger.warning(
                    "gather_dtype rounds nothing any more: after half of the latest steps all parameters were gathered "
                    "again, because they were read outside of torch.autocast, the last time %s",
                    self._name(self._latest_reader),
                )
        return self._layout.rounded

    def _gather_whole(self, reader: int | None) -> Sequence[Work]:
        name, lanes = self._name(reader), self._lanes
        if not len(lanes):
            raise RuntimeError(
                f"{name} has other ranks' values in {self._dtype} only, and their owners have closed DearState: call "
                f"state.synchronize() or state.close() on all ranks before{see('rounded-parameters')}"
            )
        try:
            moments = gather_objects(self._num_gathers, lanes.group, _CALL, self._patience)
        except LaneTimeout as error:
            raise LaneTimeout(
                f"rank {lanes.rank} reads {name} outside of torch.autocast, and not all ranks do: parameters were "
                f"gathered in {self._dtype}, so their owners have to send the rest. Call state.synchronize() on all "
                f"ranks before one of them reads parameters ({error}){see('rounded-parameters')}"
            ) from error
        if len(set(moments)) > 1:
            raise LaneError(
                f"ranks read {name} outside of torch.autocast after different steps ({moments}): read it on all of "
                f"them after the same step{see('rounded-parameters')}"
            )
        self._latest_reader = reader
        gathers = self._layout.whole_gathers(self._parameters.flats, self.rounded.now)
        return [lanes.all_gather(partitions, f"{label}, whole") for partitions, label in gathers]

    def _name(self, reader: int | None) -> str:
        return self._parameters.names[reader] if reader is not None else "the model"


def _may_round(parameter: nn.Parameter) -> bool:
    # Classes of users may read values in functions that look at a plain parameter's metadata alone.
    return type(parameter) is nn.Parameter and parameter.dtype == torch.float32 and parameter.numel() > 0
