"""TopKState: the object that users create for sparse all-reduce.

1. DDP hands over a bucket. Groups whose gradients are ready go to the lanes, in one fixed order: they are added to the
   residuals, selected from, and exchanged.
2. Just before DDP waits for its buckets at the end of the backward, wait for the groups, and for every rank's word
   whether its gradients are finite.
3. DDP has made the buckets the model's gradients: count the step.

With ``pipeline="forward"`` nobody waits in step 2; see :mod:`~ddp_hooks.topk.reduction.forward`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks.comm import agree, at_exit, see
from ddp_hooks.comm.torch_compat.autograd import queue_engine_callback
from ddp_hooks.intercept import PARAMETERWISE, co_optimizers, future_of, indices_of, refuse_join
from ddp_hooks.intercept.causes import LocalGradients, refuse_unended
from ddp_hooks.sparse import EntryCodec, Sparsity
from ddp_hooks.topk import checkpoint, checks
from ddp_hooks.topk.choosing import VariantChooser
from ddp_hooks.topk.config import TopKConfig
from ddp_hooks.topk.reduction.backward import Backward, Phase
from ddp_hooks.topk.reduction.forward import ForwardPipeline
from ddp_hooks.topk.reduction.group_reduction import DenseReduction, Gradients, GroupReduction, SparseReduction
from ddp_hooks.topk.reduction.grouping import Grouping, begin_tuning
from ddp_hooks.topk.reduction.groups import Context
from ddp_hooks.topk.reduction.steps import Steps, TopKStats

logger = logging.getLogger("ddp_hooks")


class TopKState:
    """The state of :func:`~ddp_hooks.topk_hook`: sparse all-reduce with error feedback (zhao2024spardl).

    Of every group of gradients the largest elements of the sum over ranks travel. The other elements are kept as
    residuals, on the rank that has them, and added to the next gradient. Replicas stay equal, bit for bit. Gradients
    are averaged as DDP does. On one rank nothing travels, so nothing is left out.

    Creating a state is collective: all ranks of the DDP module's group do it. Methods that wait raise ``LaneError`` if
    a rank failed, and ``LaneTimeout`` if one does not answer.

    Args:
        ddp: the model.
        config: the settings.
        scaler: the ``torch.amp.GradScaler`` of the loop, if it has one: residuals are kept without its scale, which
            changes from step to step.
        optimizer: of all parameters, for ``TopKConfig(pipeline="forward")``, which runs its updates in forwards. With
            ``"backward"`` it is only checked: it must have no momentum beside ``TopKConfig(momentum=...)``.

    Raises:
        ValueError: on every rank, before anything is changed, if the set-up cannot work, or if ranks differ.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        config: TopKConfig | None = None,
        *,
        scaler: torch.amp.GradScaler | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.config = config = config if config is not None else TopKConfig()
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        group, node_size = checks.agree_on_setup(ddp, config, self._scaler, optimizer)
        self._context = context = Context.open(ddp, config, group, node_size)
        self._lanes = lanes = context.lanes
        self._index_of = {id(parameter): index for index, parameter in enumerate(context.parameters)}
        self._finds_unused = ddp.find_unused_parameters and lanes.world_size > 1
        self._grouping = Grouping(context, self._finds_unused)
        self.tuning = begin_tuning(context, self._grouping)
        """Search for a size of groups that ``config.tuner`` asks for; None without."""
        self._chooser = VariantChooser(config, lanes)
        self._chooser.begin(0, None, later=self._is_tuning)
        self._steps = Steps(context, self._grouping, self._chooser)
        self._pipeline: ForwardPipeline | None = None
        if context.early is not None:
            assert optimizer is not None
            deferred = type(optimizer) in PARAMETERWISE or config.assume_parameterwise
            self._pipeline = ForwardPipeline(context, optimizer, deferred, self._steps)
            for co_optimizer in co_optimizers.co_optimizers_in(ddp.module):
                co_optimizer.follow(optimizer)  # after the pipeline, which may find that nobody is to step
        self._closed = False
        self._backward: Backward | None = None  # from its first bucket on
        self._local: LocalGradients | None = None
        if lanes.world_size > 1:
            self._local = LocalGradients(ddp, context.parameters, context.names, "TopKState", "topk_hook")
        ddp.join = ddp.join_hook = partial(refuse_join, "TopKState", "selects nothing")  # type: ignore[method-assign]
        nodes = lanes.nodes
        if config.algorithm in ("spardl", "auto") and config.teams == nodes.num_nodes > 1 and lanes.rank == 0:
            logger.warning(
                "as many teams as %s: each reduces by itself, and more is left out; fewer teams lose less accuracy",
                "ranks" if nodes.size == 1 else "nodes",
            )
        self._handles: list[Any] = [
            ddp.register_forward_pre_hook(self._before_forward),
            ddp.register_forward_hook(self._after_forward, always_call=True),
            at_exit(self.close, context.abandon, context.is_stuck),
        ]

    # -- what users call --------------------------------------------------------------------------------------------

    def stats(self) -> TopKStats:
        """Return the cost of the last synchronised backward on this rank."""
        return self._steps.stats

    def synchronize(self) -> None:
        """Wait for updates that are on their way. Communicates nothing: one rank alone may call it."""
        if self._pipeline is not None:
            self._pipeline.wait_for_updates()

    def wait_for_gradients(self) -> None:
        """With ``pipeline="forward"``: wait for gradients after a backward, to read, clip or change them; collective.

        The next ``optimizer.step()`` then updates at once. With ``pipeline="backward"`` this does nothing.

        Raises:
            RuntimeError: on every rank, if gradients are not finite and ``on_nonfinite="raise"``.
        """
        if self._pipeline is not None:
            self._pipeline.wait_for_gradients()

    def state_dict(self) -> dict[str, Any]:
        """Return residuals and progress of this rank, between two steps. Not collective; every rank saves its own.

        Plain tensors, lists and numbers, so ``torch.load(..., weights_only=True)`` reads it. About as large as the
        gradients.

        Raises:
            RuntimeError: in the middle of a backward, or between a backward and ``optimizer.step()``.
        """
        self._refuse_under_way("state_dict()")
        groups, chosen = self._grouping.groups, self._chooser.chosen
        return {
            "rank": self._lanes.rank,
            "world_size": self._lanes.world_size,
            "node_size": self._lanes.node_size,
            "step": self._steps.step,
            "num_skipped": self._steps.num_skipped,
            "order": self._grouping.order(),
            "chosen": [list(variant) for variant in chosen] if chosen is not None else None,
            "group_mb": self._grouping.mb,
            "tuned": self.tuning is not None and self.tuning.finished,
            "memories": [group.memory() for group in groups],
            **checkpoint.kept_by_name(groups, self._context),
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on where a run was when its states were saved; collective.

        Args:
            state: the state that this rank has saved: training goes on as if it had not stopped, bit for bit. Or, on
                any number of ranks, the states of all former ranks: what means still owe to the mean gradients stays
                equal, and with ``momentum`` the mean of velocities.

        Raises:
            ValueError: on every rank, before anything is changed, if a state does not fit.
            RuntimeError: in the middle of a backward, or between a backward and ``optimizer.step()``.
        """
        self._refuse_under_way("load_state_dict()")
        own = isinstance(state, Mapping)
        saved: list[Mapping[str, Any]] = [state] if isinstance(state, Mapping) else list(state)
        nodes = self._lanes.nodes
        problem = checkpoint.find_problem(saved, own, self._context)
        entries = checkpoint.fingerprint(saved[0], own) if problem is None else {}
        agree(entries, problem, self._lanes.group, "the state of TopKState", self.config)
        first = saved[0]
        self._steps.step, self._steps.num_skipped = first["step"], first["num_skipped"]
        group_mb = self.config.group_mb if self.config.tuner is None else first["group_mb"]
        self._grouping.restore(first["order"], group_mb)
        if self.tuning is not None:
            finished = first["tuned"] and first["world_size"] == nodes.world_size
            self.tuning.resume(group_mb, finished)
        groups = self._grouping.groups
        mine = saved if own else [state for state in saved if state["rank"] % nodes.num_nodes == nodes.node]
        checkpoint.restore(groups, self._context, mine, saved)
        same_groups = own and len(first["memories"]) == len(groups)
        self._chooser.begin(first["step"], first["chosen"] if same_groups else None, later=self._is_tuning)
        for group, memories in zip(groups, first["memories"], strict=False):
            group.memories = dict(memories) if same_groups else {}

    def close(self) -> None:
        """Finish communication, wait until every rank does the same, and end the lanes. DDP cannot remove its hook."""
        if self._closed:
            return
        self._closed = True
        if self.tuning is not None:
            self.tuning.close()
        try:
            if self._pipeline is not None:
                self._pipeline.close()
        finally:
            for handle in self._handles:
                handle.remove()
            if self._local is not None:
                self._local.close()
            self._grouping.close()
            self._context.close()

    # -- 1. a bucket is ready ---------------------------------------------------------------------------------------

    def reduce_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Submit the groups that are ready with this bucket; called by DDP, through the hook, during backward.

        Raises:
            RuntimeError: if the state is closed, or DDP reduces other parameters than before.
        """
        if self._closed:
            raise RuntimeError(
                "TopKState was closed: wrap the model in a new DistributedDataParallel to train on"
                f"{see('the-state-was-closed')}"
            )
        buffer = bucket.buffer()
        future = future_of(buffer)
        indices = indices_of(bucket, lambda parameter: self._index_of.get(id(parameter)), "TopKState")
        if self._backward is None:
            self._backward = self._begin_backward()
        self._backward.add_bucket(indices, buffer, future)
        is_last = self._backward.phase is Phase.SUBMITTED
        if self._local is not None and is_last:
            self._local.all_reduced()
        if self._pipeline is not None:
            future.set_result(buffer)  # its values come later
            if is_last:  # after DDP's own end of the backward
                queue_engine_callback(lambda: queue_engine_callback(self._end_backward))
        elif is_last:
            if self._context.ddp.static_graph and self._steps.stats.step == 0:
                self._end_exchange()  # this is DDP's end-of-backward callback, which is about to wait for the futures
            else:  # it will be queued after ours
                queue_engine_callback(self._end_exchange)
        return future

    def _begin_backward(self) -> Backward:
        if self._pipeline is not None:
            self._pipeline.refuse_unfinished()
        step = self._steps.step
        if self.tuning is not None and self._is_tuning and self._grouping.is_fixed and step >= self.config.warmup_steps:
            self.tuning.stepped()  # a step has ended, and nothing of the next one is on its way
            if self.tuning.finished:
                self._chooser.begin(step, None, later=False)
        used = self._grouping.used if self._finds_unused else None
        scale = self._scaler.get_scale() if self._scaler is not None else None
        return Backward(self._context, step, self._grouping.groups, used, scale, self._reduction_of)

    def _reduction_of(self, number: int, gradients: Gradients) -> GroupReduction:
        config, lanes, step = self.config, self._lanes, self._steps.step
        group = self._grouping.groups[number]
        density, variant = config.density_at(step), self._chooser.variant_of(number, step)
        if group.is_dense or variant.algorithm == "dense" or density == 1.0 or lanes.world_size == 1:
            return DenseReduction(group, gradients, lanes)
        sparsity = Sparsity(
            variant.algorithm,
            max(1, round(density * group.numel)),
            EntryCodec(config.wire, group.dtype),
            variant.teams,
            variant.sag,
            config.collection,
        )
        return SparseReduction(group, gradients, lanes, group.sum_of(variant.name, sparsity))

    # -- 2. the backward ends, but DDP has not waited for its buckets ------------------------------------------------

    def _end_exchange(self) -> None:
        backward = self._backward
        assert backward is not None
        backward.wait_all()
        if backward.nonfinite_ranks and backward.scale is not None:
            for buffer in backward.buffers:
                buffer.fill_(torch.inf)  # so that the scaler skips the step, and scales less, on every rank
        for future, buffer in zip(backward.futures, backward.buffers, strict=True):
            future.set_result(buffer)
        # After DDP's own, also if that is not queued yet.
        queue_engine_callback(lambda: queue_engine_callback(self._end_backward))

    # -- 3. DDP has made the buckets the model's gradients ----------------------------------------------------------

    def _end_backward(self) -> None:
        backward, self._backward = self._backward, None
        assert backward is not None
        self._grouping.used.clear()
        if self._pipeline is not None:
            if self._grouping.is_fixed and not self._chooser.is_trying:
                self._pipeline.hold(backward)
                return
            backward.wait_all()
        self._steps.finish(backward)

    # -- around it --------------------------------------------------------------------------------------------------

    @property
    def _is_tuning(self) -> bool:
        return self.tuning is not None and not self.tuning.finished

    def _refuse_under_way(self, what: str) -> None:
        moment = "in the middle of a backward"
        if self._backward is None:
            self.synchronize()
            if self._pipeline is None or self._pipeline.held is None:
                return
            moment = "between a backward and optimizer.step()"
        raise RuntimeError(f"{what} {moment}: call it between two steps{see('called-at-the-wrong-moment')}")

    def _before_forward(self, *_: Any) -> None:
        if not torch.is_grad_enabled() or self._backward is None:
            return
        context = self._context
        refuse_unended(context.ddp, context.parameters, context.names, self._backward.missing)

    def _after_forward(self, module: Any, args: Any, output: Any) -> None:
        if output is None:
            self._lanes.annotate(sys.exc_info()[1], "forward")  # DDP's own broadcast of buffers names nobody

    def __deepcopy__(self, memo: Any) -> TopKState:
        raise TypeError("a DDP module with TopKState cannot be copied: the copy would lose its hook. Copy ddp.module")

    def __reduce__(self) -> Any:
        raise TypeError("a DDP module with TopKState cannot be pickled: save ddp.module.state_dict() instead")
