"""The network as the simulator sees it: messages that cost a latency and their bytes, on one level or two."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_hooks.comm import AlphaBeta


@dataclass(frozen=True)
class Network:
    """Workers behind equal links.

    Args:
        workers: how many there are.
        link: of a worker, full duplex; of a whole node, where several workers share one.
        node_size: workers per node; neighbouring ranks share one. A divisor of ``workers``.
        inside: of a worker, to others of its node; only for nodes of several.
        native: accelerators, whose library runs collectives one after the other, by itself.
        credit_s: so many seconds in which ``link`` was idle are made up for afterwards, as by links that a token bucket
            shapes: the emulated cluster's, and many virtual machines'. Then latencies cost nothing where bytes take
            longer.
    """

    workers: int
    link: AlphaBeta
    node_size: int = 1
    inside: AlphaBeta | None = None
    native: bool = False
    credit_s: float = 0.0

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"workers must be >= 1, got {self.workers}")
        if self.node_size < 1 or self.workers % self.node_size:
            raise ValueError(f"node_size must divide {self.workers} workers, got {self.node_size}")
        if (self.node_size > 1) != (self.inside is not None):
            raise ValueError("inside is the link within a node: give it for nodes of several workers, and only there")
        if not self.credit_s >= 0:
            raise ValueError(f"credit_s must be >= 0, got {self.credit_s}")

    @property
    def bytes_per_s(self) -> float:
        """Of a link between nodes, for bounds."""
        return 1 / self.link.beta_s_per_byte if self.link.beta_s_per_byte else float("inf")


def link_of(gbit_s: float, latency_s: float = 0.0, efficiency: float = 1.0) -> AlphaBeta:
    """A link of so many Gbit/s, of which ``efficiency`` is payload (0.949 for TCP in Ethernet frames of 1,500 bytes).

    >>> link_of(8.0).beta_s_per_byte
    1e-09
    """
    if not gbit_s > 0:
        raise ValueError(f"a link's rate must be > 0 Gbit/s, got {gbit_s}")
    return AlphaBeta(latency_s, 8e-9 / (gbit_s * efficiency))
