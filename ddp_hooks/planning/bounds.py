"""Lower bound of a step that knows its layers."""

from __future__ import annotations

import heapq

from ddp_hooks.planning.step import StepProfile


def collective_s(num_bytes: float, workers: int, bytes_per_s: float) -> float:
    """Return the seconds of a bandwidth-optimal reduce-scatter, or all-gather, of `num_bytes` without latency.

    Every worker sends, and receives, (P-1)/P of the bytes. The DeAR paper (Eq. 5) drops the factor, P being 64.
    """
    return (workers - 1) / workers * num_bytes / bytes_per_s


def dependency_bound_s(
    step: StepProfile, workers: int, bytes_per_s: float, *, gathers_wait_for_step: bool = False
) -> float:
    """Return the seconds per step of the best possible schedule on an ideal link, respecting every dependency.

    The link is one server at `bytes_per_s` in each direction, without latency, framing or cost of issuing work. Every
    reduce-scatter and every gather moves (P-1)/P of its tensor and may be interrupted at any byte. The optimizer takes
    no time. Dependencies: gradient -> reduce-scatter -> gather -> forward of the layer. With `gathers_wait_for_step`
    also: all reduce-scatters -> first gather, since `optimizer.step()` is one call. Without it gathers may start in the
    backward, and the result can be below Eq. 7 of the DeAR paper.

    Gathers end within the forward that needs them, so steps do not interact. A step ends at the largest
    `gather end + forward time from that layer on`. This is scheduling on one machine with release times and precedence,
    minimising the maximum lateness; pre-emptive earliest-due-date-first solves it exactly.
    """
    release_s = [tensor.ready_s for tensor in step.tensors]
    transfers_s = [collective_s(tensor.num_bytes, workers, bytes_per_s) for tensor in step.tensors]
    due_s = [tensor.needed_s - step.forward_s for tensor in step.tensors]  # of gathers, from the end of the forward
    arrivals = step.backward_order
    ready: list[tuple[float, int, bool, float]] = []  # (due, tensor, is_gather, seconds left)
    held: list[tuple[float, int, bool, float]] = []  # gathers that wait for step()
    end_s = step.compute_s
    scatters_left = len(arrivals)
    now_s = 0.0
    position = 0
    while position < len(arrivals) or ready:
        if not ready:
            now_s = max(now_s, release_s[arrivals[position]])
        while position < len(arrivals) and release_s[arrivals[position]] <= now_s:
            tensor = arrivals[position]
            # A reduce-scatter is due one gather before its gather.
            heapq.heappush(ready, (due_s[tensor] - transfers_s[tensor], tensor, False, transfers_s[tensor]))
            position += 1
        due, tensor, is_gather, left_s = heapq.heappop(ready)
        next_arrival_s = release_s[arrivals[position]] if position < len(arrivals) else float("inf")
        if now_s + left_s > next_arrival_s:  # interrupted: the arrival may be more urgent
            heapq.heappush(ready, (due, tensor, is_gather, left_s - (next_arrival_s - now_s)))
            now_s = next_arrival_s
            continue
        now_s += left_s
        if is_gather:
            end_s = max(end_s, now_s - due_s[tensor])
            continue
        scatters_left -= 1
        held.append((due_s[tensor], tensor, True, transfers_s[tensor]))
        if not gathers_wait_for_step or scatters_left == 0:
            for gather in held:
                heapq.heappush(ready, gather)
            held.clear()
    return end_s
