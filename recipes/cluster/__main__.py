"""Runs a command on an emulated cluster, once per worker: ``python -m recipes.cluster --help``."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import NoReturn

from recipes.cluster import leftovers
from recipes.cluster.cluster import Cluster
from recipes.cluster.launch import Stopped, say
from recipes.cluster.needs import ClusterUnavailable

CANNOT_RUN = 2  # exit code for a mistake on the command line or a machine that lacks something


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command and not options.check and options.clean is None:
        parser.error("expected a COMMAND after --, or --check, or --clean")
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup
            signal.signal(number, _stop)
    try:
        if options.clean is not None:
            return _clean(options.clean)
        return _run(options, command)
    except (ClusterUnavailable, ValueError) as error:
        say(str(error))
        return CANNOT_RUN
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Stopped as stopped:
        return 128 + stopped.number


def _run(options: argparse.Namespace, command: Sequence[str]) -> int:
    with Cluster(options.workers, options.rate, options.latency, options.ranks_per_node) as cluster:
        if options.check:
            _show_speeds(cluster, receivers=range(0, cluster.num_workers, cluster.ranks_per_node))
        elif not options.quiet:
            _show_speeds(cluster, receivers=[0])
        if not command:
            return 0
        return cluster.run(command, timeout=options.timeout, grace=options.grace, prefix=options.prefix)


def _show_speeds(cluster: Cluster, receivers: Iterable[int]) -> None:
    """Measures what each receiver gets from its right-hand neighbour, one after another, and says it."""
    rate_bit_s = cluster.link.rate_bit_s
    links = f"{cluster.num_workers} workers at {rate_bit_s / 1e6:g} Mbit/s"
    if cluster.num_workers == cluster.ranks_per_node:
        say(f"{links}; no link to measure")
        return
    for receiver in receivers:
        sender = (receiver + cluster.ranks_per_node) % cluster.num_workers
        speed = cluster.measure(sender, receiver)
        share = speed.goodput_bit_s / rate_bit_s
        say(
            f"{links}; measured from rank {sender} to {receiver}: {speed.goodput_bit_s / 1e6:.1f} Mbit/s of "
            f"goodput ({share:.1%}), round trip {speed.round_trip_s * 1e3:.2f} ms"
        )


def _clean(names: Sequence[str]) -> int:
    """Ends what killed clusters left behind; those named, or all."""
    for name in names or leftovers.find():
        say(f"{name}: ended {leftovers.remove(name)} processes")
    return 0


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise Stopped(number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.cluster",
        usage="%(prog)s [options] -- COMMAND …",
        description="Run COMMAND once per worker, each in a network namespace of its own behind a shaped "
        "link, with torchrun's environment variables set. The exit code is that of the first worker that "
        "failed.",
        epilog="example: python -m recipes.cluster --workers 4 --rate 500mbit -- python train.py --epochs 3",
    )
    add = parser.add_argument
    add("--workers", type=int, default=4, metavar="N", help="number of workers (default: %(default)s)")
    add("--rate", default="1gbit", help="rate of each link and direction, as 2.5gbit (default: %(default)s)")
    add("--ranks-per-node", type=int, default=1, metavar="N", help="workers that share a link (default: %(default)s)")
    add("--latency", help="one-way delay between two workers: 500us, 1ms (default: none added; needs netem)")
    add("--timeout", type=float, metavar="SECONDS", help="stop all workers after this time; exit code 124")
    add(
        "--grace",
        type=float,
        default=15.0,
        metavar="SECONDS",
        help="after one worker failed, time for the others to end by themselves (default: %(default)g)",
    )
    add("--prefix", action="store_true", help="show the standard output of all ranks, the rank in front")
    add("--check", action="store_true", help="measure every link; COMMAND may be left out")
    add("--quiet", action="store_true", help="do not measure and print the rate before the run")
    add("--clean", nargs="*", metavar="NAME", help="end what killed clusters left behind, as every run does")
    add("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="program and arguments")
    return parser


if __name__ == "__main__":
    sys.exit(main())
