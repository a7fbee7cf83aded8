"""A warning where rounding takes much of gradients, because few of their numbers are much larger than the others."""

from __future__ import annotations

import logging

import torch.distributed as dist

logger = logging.getLogger("ddp_hooks")

_LOOK_EVERY = 100  # backwards
_LARGE_ERROR = 0.25  # of 4 bits; normally distributed gradients have 0.11


class RoundingWarning:
    """Warns once. ``setting`` is the one that rounds to 4 bits, ``remedy`` what to use where training suffers."""

    def __init__(self, setting: str, remedy: str) -> None:
        self._setting = setting
        self._remedy = remedy
        self._num_backwards = 0
        self._has_warned = False

    def begin_backward(self) -> bool:
        """Return True if errors are to be measured in this one, the 1st, 101st, 201st ..."""
        self._num_backwards += 1
        return self._num_backwards % _LOOK_EVERY == 1

    def look(self, name: str, error: float) -> None:
        """Warn if ``error`` of the gradients ``name``, as :func:`~.wire.codecs.relative_error` returns it, is large."""
        if error > _LARGE_ERROR and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "rank %d: with %s rounding takes %.0f %% of the norm of gradients (%s), because few of them are much "
                "larger than the others; where training suffers, use %s",
                dist.get_rank(), self._setting, 100 * error, name, self._remedy,
            )  # fmt: skip
