"""Lower bounds of a step by the equations of the DeAR paper; `ddp_hooks.planning.step` has one that knows the layers.

Pure functions of times in seconds, sizes in bytes and rates in bytes per second. Equations are numbered as in the paper
(Zhang et al., "DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce Pipelining").
"""

from __future__ import annotations


def dear_bound_s(forward_s: float, backward_s: float, reduce_scatter_s: float, all_gather_s: float) -> float:
    """Eq. 7: gathers hidden behind the forward pass, reduce-scatters behind the backward pass."""
    return max(forward_s, all_gather_s) + max(backward_s, reduce_scatter_s)


def baseline_bound_s(forward_s: float, backward_s: float, all_reduce_s: float) -> float:
    """Eq. 8: all-reduces hidden behind the backward pass only, as in DDP."""
    return forward_s + max(backward_s, all_reduce_s)


def max_speedup(compute_s: float, workers: int, collective_s: float) -> float:
    """Eq. 6 with t_bp = 2 t_ff and t_rs = t_ag: DeAR's largest speedup over one worker.

    Args:
        compute_s: t_ff + t_bp.
        collective_s: t_rs, which is also t_ag.
    """
    step_s = dear_bound_s(compute_s / 3, compute_s * 2 / 3, collective_s, collective_s)
    return workers * compute_s / step_s


def compute_from_max_speedup(speedup: float, workers: int, collective_s: float) -> float:
    """The compute seconds (t_ff + t_bp) for which Eq. 6 gives `speedup`: `max_speedup` inverted.

    Where the speedup equals the number of workers, communication is hidden completely, and the result is the smallest
    such time.

    Raises:
        ValueError: the speedup is not above 0, or above the number of workers.
    """
    if not 0 < speedup <= workers:
        raise ValueError(f"speedup must be in (0, {workers}], got {speedup}")
    if speedup == workers:
        return 3 * collective_s  # t_ff = t_ag
    both_exposed_s = 2 * collective_s * speedup / workers
    if both_exposed_s * 2 / 3 <= collective_s:
        return both_exposed_s
    return collective_s / (workers / speedup - 2 / 3)  # only the gathers are longer than their compute
