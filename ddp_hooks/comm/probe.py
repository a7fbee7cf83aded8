"""Link profile: a short measurement that chooses lanes and message sizes.

On slow links several lanes and messages of 1 MiB keep the link busy while sums are formed. A message costs the
processor about 0.2 ms, which counts on faster links: there one lane with larger messages carries as much for less.
Measured with four workers on two cores: docs/results/dear_defaults.md.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_hooks.comm.algorithms.exchange import Algorithm, Recv, Send
from ddp_hooks.comm.executors.lanes import Lanes

_MIB = 1 << 20
_PROBE_BYTES = 2 * _MIB
_MEDIUM_BYTES_S = 160e6  # above this the processor counts
_FAST_BYTES_S = 400e6  # above this it limits


@dataclass(frozen=True)
class LinkProfile:
    """Number of lanes and message size for a link; the same on every rank."""

    goodput_bytes_s: float | None  #: that a rank sends while it receives as many; None if not measured
    num_lanes: int
    message_bytes: int  #: largest message

    @property
    def outruns_processor(self) -> bool:
        """True if a message costs the CPU more time than it travels."""
        return self.goodput_bytes_s is not None and self.goodput_bytes_s > _FAST_BYTES_S


def profile_link(lanes: Lanes) -> LinkProfile:
    """Measure the link with a few messages from rank to rank, in well under a second; collective.

    Accelerators and single ranks are not measured.
    """
    if lanes.world_size == 1 or lanes.native:
        return suited_to(None)
    outgoing, incoming = (torch.zeros(_PROBE_BYTES, dtype=torch.uint8) for _ in range(2))
    seconds = []
    for _ in range(4):
        start_s = time.perf_counter()
        lanes.run(shift(outgoing, incoming, lanes.rank, lanes.world_size), "a probe of the link").wait()
        seconds.append(time.perf_counter() - start_s)
    gathered = lanes.gather_objects(statistics.median(seconds[1:]), "set-up, which measures the link")
    return suited_to(_PROBE_BYTES / statistics.median(gathered))


def suited_to(goodput_bytes_s: float | None) -> LinkProfile:
    """Return the profile for a link of this goodput; None: an accelerator's link, or a single rank."""
    if goodput_bytes_s is None:
        return LinkProfile(None, 1, 4 * _MIB)
    if goodput_bytes_s > _FAST_BYTES_S:
        return LinkProfile(goodput_bytes_s, 1, 16 * _MIB)
    if goodput_bytes_s > _MEDIUM_BYTES_S:
        return LinkProfile(goodput_bytes_s, 1, 4 * _MIB)
    return LinkProfile(goodput_bytes_s, 3, _MIB)


def shift(outgoing: Tensor, incoming: Tensor, rank: int, world_size: int, rounds: int = 1) -> Algorithm:
    """Send to the next rank while the one before sends, several times in a row."""
    for _ in range(rounds):
        yield [Recv((rank - 1) % world_size, incoming), Send((rank + 1) % world_size, outgoing)]
