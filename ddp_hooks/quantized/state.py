"""QuantizedState: the object that users create for an all-reduce in fewer bits.

1. DDP hands over a bucket. A lane adds its residual, encodes it and exchanges it, while the backward goes on.
2. Just before DDP waits for its buckets at the end of the backward, wait for the lanes.
3. DDP has made the buckets the model's gradients: count the step.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks.comm import Lanes, LaneSettings, Recorder, Residuals, agree, at_exit, see
from ddp_hooks.comm.rounding_warning import RoundingWarning
from ddp_hooks.comm.torch_compat.autograd import queue_engine_callback
from ddp_hooks.comm.torch_compat.ddp import managed_parameters
from ddp_hooks.intercept import future_of, indices_of, refuse_join
from ddp_hooks.intercept.causes import LocalGradients, refuse_unended
from ddp_hooks.quantized import checkpoint
from ddp_hooks.quantized.backward import Backward, Context, Run
from ddp_hooks.quantized.checks import agree_on_setup
from ddp_hooks.quantized.config import QuantizedConfig


@dataclass(frozen=True)
class QuantizedStats:
    """Cost of one synchronised backward, on this rank."""

    step: int = 0  #: its number, from 1; 0 before the first
    num_buckets: int = 0  #: runs of gradients that travelled together
    num_lanes: int = 0  #: lanes that carried them
    sent_bytes: int = 0  #: payload of all messages
    received_bytes: int = 0
    comm_s: float | None = 0.0
    """Seconds in which lanes were at work, codecs among it, added over lanes. None on accelerators, where streams run
    ahead of the processor."""
    stall_s: float = 0.0  #: seconds for which training waited
    relative_error: float = 0.0
    """Norm of what rounding takes from this rank's gradients, by their norm: the largest of samples of all buckets, in
    the last of the steps 1, 101, 201 ..."""


class QuantizedState:
    """The state of :func:`~ddp_hooks.quantized_hook`: all-reduce in fewer bits, with error feedback.

    Gradients travel in 16, 8 or 4 bits, straight to the rank that adds them in float32, and their mean travels back
    in as many bits; gradients are averaged as DDP does, and may be read after the backward. Each number is rounded
    twice, whatever the number of ranks. What rounding takes is kept as a residual, as large as the model, float32, and
    added to the next gradient. Replicas stay equal, bit for bit. On one rank, or one node, nothing is rounded.

    Infinity and NaN travel: ranks get them alike, in all elements of a block, and nothing of them stays. So a gradient
    scaler skips a step on all ranks, or none. Residuals that were sent in such a step are skipped with it.

    Creating a state is collective: all ranks of the DDP module's group do it. Methods that wait raise ``LaneError`` if
    a rank failed, and ``LaneTimeout`` if one does not answer.

    Sources: blocks of int8 and direct sends of ZeRO++ (Wang et al., 2023); error feedback (Seide et al., 2014), with
    4 bits averaged as in LoCo (Xie et al., 2024).

    Args:
        ddp: the model.
        config: the settings.
        scaler: the ``torch.amp.GradScaler`` of the loop, if it has one: residuals follow its scale, which changes from
            step to step. If it is forgotten, they keep the scale of their step, and nobody notices.

    Raises:
        ValueError: on every rank, before anything is changed, if the set-up cannot work, or if ranks differ.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        config: QuantizedConfig | None = None,
        *,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.config = config = config if config is not None else QuantizedConfig()
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        group, node_size = agree_on_setup(ddp, config, self._scaler)
        self._ddp = cast(DistributedDataParallel, weakref.proxy(ddp))  # whose reducer holds the hook's state
        managed = managed_parameters(ddp)
        parameters, recorder = list(managed.values()), Recorder(False)
        settings = LaneSettings(
            timeout_s=config.timeout_s, stall_warning_s=config.stall_warning_s, node_size=node_size
        )
        self._lanes = lanes = Lanes(group, config.lanes, parameters[0].device, settings, recorder)
        residuals = Residuals(parameters)
        self._context = Context(config, parameters, list(managed), residuals, lanes, lanes.nodes, recorder)
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._local: LocalGradients | None = None
        if lanes.world_size > 1:
            self._local = LocalGradients(ddp, parameters, list(managed), "QuantizedState", "quantized_hook")
        self._finds_unused = ddp.find_unused_parameters
        self._step = 0  # number of synchronised backwards, also before this run was resumed
        self._scale = 1.0  # of the residuals, by the gradient scaler
        self._stats = QuantizedStats()
        self._before = lanes.traffic, 0.0  # bytes and stalls until the last step
        self._runs: list[Run] | None = None  # in which gradients travelled last, or travel next in a resumed run
        self._is_resumed = False  # since the last backward
        self._warning = RoundingWarning("bits=4", "bits=8, or a smaller block_numel")
        self._closed = False
        self._backward: Backward | None = None  # from its first bucket on
        ddp.join = ddp.join_hook = partial(refuse_join, "QuantizedState", "has no gradients")  # type: ignore[method-assign]
        self._handles: list[Any] = [
            ddp.register_forward_pre_hook(self._before_forward),
            ddp.register_forward_hook(self._after_forward, always_call=True),
            at_exit(self.close, lanes.abandon, self._is_stuck),
        ]

    # -- what users call --------------------------------------------------------------------------------------------

    def stats(self) -> QuantizedStats:
        """Return the cost of the last synchronised backward on this rank."""
        return self._stats

    def synchronize(self) -> None:
        """Do nothing: after a backward everything has arrived. Other states of this package wait here."""

    def state_dict(self) -> dict[str, Any]:
        """Return residuals and progress of this rank, between two steps. Not collective; every rank saves its own.

        Plain tensors, lists and numbers, so ``torch.load(..., weights_only=True)`` reads it. As large as the model in
        float32.

        Raises:
            RuntimeError: in the middle of a backward.
        """
        self._refuse_under_way("state_dict()")
        self._scale_residuals(1.0)  # in place, so that a resumed run, which begins without scale, rounds alike
        return {
            "rank": self._lanes.rank,
            "world_size": self._lanes.world_size,
            "step": self._step,
            "runs": checkpoint.runs_by_name(self._runs, self._context),
            "residual": checkpoint.residuals_by_name(self._context),
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on where a run was when its states were saved; collective.

        Args:
            state: the state that this rank has saved: training goes on as if it had not stopped, bit for bit, if the
                same buckets and nodes are used, and DDP had formed its final buckets, in its second step, or third with
                ``static_graph``: a block of numbers may reach over parameters, but not over buckets. Or, on any number
                of ranks, the states of all former ranks: what means still owe to the mean gradients stays equal.

        Raises:
            ValueError: on every rank, before anything is changed, if a state does not fit.
            RuntimeError: in the middle of a backward.
        """
        self._refuse_under_way("load_state_dict()")
        own = isinstance(state, Mapping)
        saved: list[Mapping[str, Any]] = [state] if isinstance(state, Mapping) else list(state)
        rank, world_size, context = self._lanes.rank, self._lanes.world_size, self._context
        problem = checkpoint.find_problem(saved, rank if own else None, world_size, context)
        entries: dict[str, object] = {}
        if problem is None:
            entries = {key: saved[0][key] for key in ("step", "runs")}
            entries["what is loaded"] = "this rank's own state" if own else "a list of states"
        agree(entries, problem, self._lanes.group, "the state of QuantizedState", self.config)
        checkpoint.restore(saved if own else [each for each in saved if each["rank"] % world_size == rank], context)
        self._step, self._scale = saved[0]["step"], 1.0
        self._runs = checkpoint.runs_of(saved[0]["runs"], context) if own else None
        self._is_resumed = True

    def close(self) -> None:
        """Finish communication, wait until every rank does the same, and end the lanes. DDP cannot remove its hook."""
        if self._closed:
            return
        self._closed = True
        for handle in self._handles:
            handle.remove()
        if self._local is not None:
            self._local.close()
        self._lanes.close()

    # -- 1. a bucket is ready ---------------------------------------------------------------------------------------

    def reduce_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Submit a bucket to a lane; called by DDP, through the hook, during backward.

        Raises:
            RuntimeError: if the state is closed, or DDP reduces other parameters than before.
        """
        if self._closed:
            raise RuntimeError(
                "QuantizedState was closed: wrap the model in a new DistributedDataParallel to train on"
                f"{see('the-state-was-closed')}"
            )
        buffer = bucket.buffer()
        future = future_of(buffer)
        indices = indices_of(bucket, lambda parameter: self._index_of.get(id(parameter)), "QuantizedState")
        if self._backward is None:
            self._backward = self._begin_backward()
        self._backward.add_bucket(indices, buffer, future)
        if not self._backward.missing:
            if self._local is not None:
                self._local.all_reduced()
            if self._ddp.static_graph and self._stats.step == 0:
                self._end_exchange()  # this is DDP's end-of-backward callback, which is about to wait for the futures
            else:  # it will be queued after ours
                queue_engine_callback(self._end_exchange)
        return future

    def _begin_backward(self) -> Backward:
        self._scale_residuals(self._scaler.get_scale() if self._scaler is not None else 1.0)
        runs = self._runs
        return Backward(
            self._context,
            runs if self._is_resumed else None,
            runs if runs is not None and not self._is_resumed else (),
            self._local.written if self._local is not None and self._finds_unused else None,
            self._warning.begin_backward(),
        )

    # -- 2. the backward ends, but DDP has not waited for its buckets ------------------------------------------------

    def _end_exchange(self) -> None:
        backward = self._backward
        assert backward is not None
        backward.wait_all()
        for future, buffer in zip(backward.futures, backward.buffers, strict=True):
            future.set_result(buffer)
        # After DDP's own, also if that is not queued yet.
        queue_engine_callback(lambda: queue_engine_callback(self._end_backward))

    # -- 3. DDP has made the buckets the model's gradients ----------------------------------------------------------

    def _end_backward(self) -> None:
        backward, self._backward = self._backward, None
        assert backward is not None
        self._runs, self._is_resumed = backward.submitted, False
        self._step += 1
        lanes, (traffic_before, stall_before_s) = self._lanes, self._before
        self._before = lanes.traffic, self._context.stall.seconds
        traffic, error = self._before[0] - traffic_before, self._stats.relative_error
        if backward.measures:
            error = max((exchange.relative_error for exchange in backward.exchanges), default=0.0)
        self._stats = QuantizedStats(
            step=self._stats.step + 1,
            num_buckets=len(backward.submitted),
            num_lanes=len(lanes),
            sent_bytes=traffic.sent_bytes,
            received_bytes=traffic.received_bytes,
            comm_s=None if lanes.native else traffic.busy_s,
            stall_s=self._before[1] - stall_before_s,
            relative_error=error,
        )
        if self.config.bits == 4:
            for exchange in backward.exchanges:
                self._warning.look(exchange.name, exchange.relative_error)

    # -- around it --------------------------------------------------------------------------------------------------

    def _scale_residuals(self, scale: float) -> None:
        """Bring residuals to the scale of gradients."""
        factor, self._scale = scale / self._scale, scale
        if factor != 1.0:
            self._context.residuals.scale(factor)

    def _refuse_under_way(self, what: str) -> None:
        if self._backward is not None:
            raise RuntimeError(
                f"{what} in the middle of a backward: call it between two steps{see('called-at-the-wrong-moment')}"
            )

    def _before_forward(self, *_: Any) -> None:
        if torch.is_grad_enabled() and self._backward is not None:
            refuse_unended(self._ddp, self._context.parameters, self._context.names, self._backward.missing)

    def _after_forward(self, module: Any, args: Any, output: Any) -> None:
        if output is None:
            self._lanes.annotate(sys.exc_info()[1], "forward")  # DDP's own broadcast of buffers names nobody

    def _is_stuck(self) -> bool:
        return self._lanes.stuck

    def __deepcopy__(self, memo: Any) -> QuantizedState:
        raise TypeError(
            "a DDP module with QuantizedState cannot be copied: the copy would lose its hook. Copy ddp.module"
        )

    def __reduce__(self) -> Any:
        raise TypeError("a DDP module with QuantizedState cannot be pickled: save ddp.module.state_dict() instead")
