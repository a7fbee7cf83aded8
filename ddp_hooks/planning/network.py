"""Machines as the simulator sees them, links and processors, and the rounds in which collectives load them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from ddp_hooks.comm import AlphaBeta


@dataclass(frozen=True)
class Network:
    """Workers behind equal links."""

    workers: int
    link: AlphaBeta  #: full-duplex link of one worker, or of one node whose workers share it
    node_size: int = 1  #: workers per node, a divisor of ``workers``; neighbouring ranks share a node
    inside: AlphaBeta | None = None  #: link of a worker to others of its node; only for nodes of several workers
    native: bool = False  #: workers are accelerators, whose library runs collectives one after the other by itself
    #: Idle seconds that ``link`` makes up for afterwards, as token buckets do (the emulated cluster, many virtual
    #: machines). Latencies then cost nothing where bytes take longer.
    burst_credit_s: float = 0.0

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"workers must be >= 1, got {self.workers}")
        if self.node_size < 1 or self.workers % self.node_size:
            raise ValueError(f"node_size must divide {self.workers} workers, got {self.node_size}")
        if (self.node_size > 1) != (self.inside is not None):
            raise ValueError("inside is the link within a node: give it for nodes of several workers, and only there")
        if not self.burst_credit_s >= 0:
            raise ValueError(f"burst_credit_s must be >= 0, got {self.burst_credit_s}")

    @property
    def bytes_per_s(self) -> float:
        return 1 / self.link.beta_s_per_byte if self.link.beta_s_per_byte else float("inf")


def link_of(gbit_s: float, latency_s: float = 0.0, efficiency: float = 1.0) -> AlphaBeta:
    """Return a link of so many Gbit/s, of which ``efficiency`` is payload (0.949 for TCP in frames of 1,500 bytes).

    >>> link_of(8.0).beta_s_per_byte
    1e-09

    Raises:
        ValueError: the rate is not above 0.
    """
    if not gbit_s > 0:
        raise ValueError(f"a link's rate must be > 0 Gbit/s, got {gbit_s}")
    return AlphaBeta(latency_s, 8e-9 / (gbit_s * efficiency))


@dataclass(frozen=True)
class Costs:
    """Seconds that communication costs a worker's processor; 0 where an accelerator does it at no cost."""

    message_s: float = 0.0  #: per message, sent and received
    byte_s: float = 0.0  #: per byte of a message, sent and received
    scatter_byte_s: float | None = None  #: per byte of a reduce-scatter, sums included; by default ``byte_s``
    all_reduce_byte_s: float | None = None  #: per byte of the backend's all-reduce; by default ``byte_s``
    all_reduce: float = 1.0  #: time of the backend's all-reduce, relative to our ring
    copy_s_per_byte: float = 0.0  #: of a gradient, into DDP's bucket
    exact_s_per_byte: float = 0.0  #: of a gradient that fits 16 bits, to check, encode and decode it once
    code_s_per_byte: float = 0.0  #: of a gradient, to encode it as int8 with error feedback, and decode it once
    select_s_per_byte: float = 0.0  #: of a gradient, for all that a sparse all-reduce computes
    python: float = 0.0  #: time of Python in hooks, relative to a core of its own; 0 where an accelerator hides it
    cores: int = 1  #: processor cores per worker, at least 1
    oversubscription: float = 1.0  #: workers per core, at least 1


Phase: TypeAlias = Literal["reduce-scatter", "all-gather"]


class Round(NamedTuple):
    """A round of a collective, done ``times`` times in a row, in which all ranks do the same at the same time.

    So one rank stands for all; with several workers per node, the ranks of one node do.
    """

    times: int
    between_bytes: float  # through the worker's link; through the node's link where workers share one
    inside_bytes: float = 0.0  # from a worker to others of its node
    messages: int = 1  # per worker


Rounds: TypeAlias = tuple[Round, ...]


def ring(workers: int, node_size: int, num_bytes: float) -> Rounds:
    """Scatter or gather ``num_bytes`` from neighbour to neighbour, in P - 1 rounds (DeAR, Eq. 3)."""
    if workers == 1:
        return ()
    share_bytes = num_bytes / workers
    inside_bytes = share_bytes if node_size > 1 else 0.0
    return (Round(workers - 1, share_bytes if node_size < workers else 0.0, inside_bytes),)


def all_to_all(workers: int, node_size: int, num_bytes: float) -> Rounds:
    """Cut ``num_bytes`` into equal shares, keep one, and send one to each other worker, in one round.

    A direct reduce-scatter of ``num_bytes`` sends the same.
    """
    if workers == 1:
        return ()
    share_bytes = num_bytes / workers
    between_bytes = node_size * (workers - node_size) * share_bytes
    return (Round(1, between_bytes, (node_size - 1) * share_bytes, workers - 1),)
