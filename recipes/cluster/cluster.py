"""The emulated cluster as an object."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from types import TracebackType

from recipes.cluster import leftovers, network, selfcheck
from recipes.cluster.keeper import MARK_VARIABLE
from recipes.cluster.launch import run_workers, worker_environment
from recipes.cluster.namespaces import Namespaces
from recipes.cluster.needs import ClusterUnavailable, find_tools

logger = logging.getLogger(__name__)


class Cluster:
    """Workers in network namespaces of their own, joined by a bridge over shaped links.

    A context manager: the network exists inside the `with` block, and all processes started in it end with
    it. If this process is killed, they end too.

    Args:
        workers: how many, at least 1.
        rate: line rate of every worker's link in each direction, such as ``"500mbit"`` or ``"2.5gbit"``.
        latency: one-way delay between two nodes, such as ``"1ms"``; needs netem in the kernel.
        ranks_per_node: neighbouring workers that share a namespace, and so a link; a divisor of ``workers``.

    Raises:
        ValueError: a setting has a wrong form.
        ClusterUnavailable: (on entering) this machine lacks something; the message says what.
    """

    def __init__(self, workers: int, rate: str, latency: str | None = None, ranks_per_node: int = 1) -> None:
        if not 1 <= workers <= network.MAX_WORKERS:
            raise ValueError(f"workers must lie in 1 … {network.MAX_WORKERS}, got {workers}")
        if ranks_per_node < 1 or workers % ranks_per_node:
            raise ValueError(f"ranks_per_node must divide {workers} workers, got {ranks_per_node}")
        self.num_workers = workers
        self.ranks_per_node = ranks_per_node
        self.link = network.Link(
            rate_bit_s=network.parse_rate(rate),
            latency_s=0.0 if latency is None else network.parse_latency(latency),
        )
        self.name = leftovers.new_name()
        self._namespaces: Namespaces | None = None

    def __enter__(self) -> Cluster:
        if self._namespaces is not None:
            raise RuntimeError(f"{self.name} is set up already: make another Cluster")
        tools = find_tools()
        for name in leftovers.find():
            logger.warning("ended %d processes left behind by %s", leftovers.remove(name), name)
        # The bridge has a namespace too, so that the host's own network stays untouched.
        num_nodes = self.num_workers // self.ranks_per_node
        self._namespaces = Namespaces(num_nodes + 1, self.name, tools)
        try:
            network.build(self._namespaces, tools, num_nodes, self.link)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends everything that runs in the cluster, and the cluster."""
        if self._namespaces is not None:
            self._namespaces.close()
            self._namespaces = None

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        grace: float = 15.0,
        prefix: bool = False,
    ) -> int:
        """Runs a command once per worker, with torchrun's environment variables, and waits for all.

        Rank 0's output passes through unchanged. Of the others, standard error is shown, the rank in front.

        Args:
            command: program and arguments.
            env: variables to add to this process's own.
            timeout: seconds after which all workers are stopped.
            grace: seconds that the others get to end by themselves after one worker failed.
            prefix: show the other ranks' standard output as well.

        Returns:
            0 if all succeeded, the exit code of the first worker that failed, or 124 after the timeout.
        """
        base = {**os.environ, **(env or {}), MARK_VARIABLE: self.name}
        if not command:
            raise ValueError("expected a command to run, got none")
        if shutil.which(command[0], path=base.get("PATH")) is None:
            raise ValueError(f"{command[0]!r} is not a program on PATH; start a script as: python SCRIPT")
        return run_workers(
            [[*self.enter(rank), *command] for rank in range(self.num_workers)],
            [
                worker_environment(base, rank, self.num_workers, self.ranks_per_node)
                for rank in range(self.num_workers)
            ],
            timeout_s=timeout,
            grace_s=grace,
            prefix=prefix,
        )

    def measure(self, sender: int | None = None, receiver: int = 0) -> selfcheck.LinkSpeed:
        """What a TCP stream from one worker to another really carries. Sends for about half a second.

        Args:
            sender: None: the first worker of the second node.
        """
        sender = self.ranks_per_node if sender is None else sender
        # Slow start doubles once per round trip: ten of them reach any rate we offer.
        warm_up_s = 0.1 + 20 * self.link.latency_s
        address = network.address(receiver // self.ranks_per_node)
        return selfcheck.measure(self.enter(sender), self.enter(receiver), address, warm_up_s)

    def enter(self, rank: int) -> list[str]:
        """What to write before a command so that it runs in a worker's network."""
        if self._namespaces is None:
            raise RuntimeError("the cluster is not set up: use it as `with Cluster(…) as cluster:`")
        if not 0 <= rank < self.num_workers:
            raise ValueError(f"rank must lie in 0 … {self.num_workers - 1}, got {rank}")
        return self._namespaces.enter(rank // self.ranks_per_node)


def why_unavailable(latency: str | None = None) -> str | None:
    """Why the emulated cluster cannot work here, or None if it can. Sets up a small one to find out."""
    try:
        with Cluster(2, "1gbit", latency):
            return None
    except ClusterUnavailable as error:
        return str(error)
