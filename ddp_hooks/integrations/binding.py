"""One DDP model in somebody else's loop: its optimizer, the state of its hook, and what loops do with them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks.comm import see, torch_compat
from ddp_hooks.dear import DearConfig, DearState, dear_hook
from ddp_hooks.embedding import EmbeddingTables
from ddp_hooks.integrations.settings import Dense
from ddp_hooks.intercept.co_optimizers import co_optimizers_in
from ddp_hooks.topk import TopKState, topk_hook

logger = logging.getLogger("ddp_hooks")

KEPT = "ddp_hooks_rank{}.bin"
"""In a checkpoint: what one rank keeps of its gradients."""
TABLES = "ddp_hooks_tables.bin"
"""In a checkpoint: the state of the tables' optimizer."""


def ddp_of(model: object) -> DistributedDataParallel | None:
    """The DDP module that was prepared, compiled or not."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, DistributedDataParallel) else None


def tables_of(model: nn.Module) -> EmbeddingTables | None:
    """The sharded tables of a model, if it has any."""
    found = [co_optimizer for co_optimizer in co_optimizers_in(model) if isinstance(co_optimizer, EmbeddingTables)]
    return found[0] if found else None


@dataclass(frozen=True)
class _Final:
    """What checkpoints need when communication is over.

    Args:
        optimizer: its state.
        kept: what this rank keeps of gradients.
    """

    optimizer: dict[str, Any]
    kept: dict[str, Any]


class Binding:
    """A DDP model whose gradients travel by a hook.

    Making one is collective: all ranks of the DDP module's group do it.

    Args:
        ddp: the model.
        optimizer: that steps its parameters; all of them, for hooks that need one.
        dense: the hook's settings; None: DDP's own all-reduce, beside tables.
        scaler: the loss scaler of the loop.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        dense: Dense | None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.ddp = ddp
        self.optimizer = optimizer
        self.tables = tables_of(ddp.module)
        self.dear: DearState | None = None
        self.topk: TopKState | None = None
        if isinstance(dense, DearConfig):
            self.dear = DearState(ddp, optimizer, dense, saved_by_loop=True)
            ddp.register_comm_hook(self.dear, dear_hook)
        elif dense is not None:
            self.topk = TopKState(ddp, dense, scaler=scaler, optimizer=optimizer)
            ddp.register_comm_hook(self.topk, topk_hook)
        if self.tables is not None and self.dear is None:
            self.tables.follow(optimizer)
        self._final: _Final | None = None
        self._parameters = {id(parameter) for parameter in torch_compat.managed_parameters(ddp).values()}

    @property
    def rank(self) -> int:
        """Of this process among those that train the model."""
        return dist.get_rank(self.ddp.process_group)

    @property
    def has_sharded_optimizer(self) -> bool:
        """Whether the optimizer holds shards by now, with which it is spent after :meth:`close`."""
        return self.dear is not None and self.dear.has_sharded_optimizer

    def owns(self, parameter: Tensor) -> bool:
        """Whether DDP reduces the gradient of a parameter."""
        return id(parameter) in self._parameters

    # -- gradients --------------------------------------------------------------------------------------------------

    def sources(self, parameters: Sequence[Tensor]) -> list[Any]:
        """What :func:`~ddp_hooks.clip_grad_norm_` is to look at for these parameters of the model; collective.

        Raises:
            ValueError: with DeAR, if these are only some of the model's, of which ranks hold no separate norms.
        """
        if self.dear is not None:
            missing = len(self._parameters.difference(map(id, parameters)))
            if missing:
                raise ValueError(
                    f"clipping was asked for {len(self._parameters) - missing} of the model's "
                    f"{len(self._parameters)} trained parameters, but ranks hold shards of all of them: pass "
                    f"model.parameters(){see('in-a-trainer')}"
                )
            return [self.dear]
        if self.topk is not None:
            self.topk.wait_for_gradients()
        return [list(parameters), *([self.tables] if self.tables is not None else [])]

    def clip_grad_value_(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        """Clamp the gradients of these parameters of the model, and of its tables; all ranks do it."""
        if self.dear is not None:
            self.sources(parameters)
            self.dear.clip_grad_value_(clip_value)
            return
        if self.topk is not None:
            self.topk.wait_for_gradients()
        torch.nn.utils.clip_grad_value_(parameters, clip_value)
        if self.tables is not None:
            with self.tables.reduced_gradients() as holders:
                for holder in holders:
                    torch.nn.utils.clip_grad_value_(holder, clip_value)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's ``state_dict``, complete on the first rank, and nothing on others with DeAR; collective."""
        if self._final is not None:
            return self._final.optimizer
        if self.topk is not None:
            self.topk.synchronize()
        if self.dear is not None:
            self.dear.consolidate()
        return self.optimizer.state_dict() if self.dear is None or self.rank == 0 else {}

    def consolidate_tables(self, everywhere: bool = False) -> None:
        """Gather tables, if there are any, on the first rank or on all of them, until the next step; collective."""
        if self.tables is not None:
            self.tables.consolidate(None if everywhere else 0)

    @property
    def has_whole_tables(self) -> bool:
        """Whether the model's ``state_dict`` can be had on this rank."""
        return self.tables is None or self.tables.is_whole

    @contextmanager
    def complete(self, everywhere: bool = False) -> Iterator[None]:
        """While it lasts, the optimizer's ``state_dict`` is complete where a loop writes it; collective.

        Args:
            everywhere: on every rank. Otherwise it is on the first one, and empty on others.
        """
        with ExitStack() as stack:
            if self.dear is not None and everywhere:
                full = self.dear.full_optimizer_state_dict()
                stack.enter_context(replaced(self.optimizer, "state_dict", lambda: full))
            elif self.dear is not None:
                state = self.optimizer_state()
                stack.enter_context(replaced(self.optimizer, "state_dict", lambda: state))
            if self.topk is not None:
                self.topk.synchronize()
            self.consolidate_tables(everywhere)
            yield

    def save(self, folder: str | os.PathLike[str], everywhere: bool = False) -> None:
        """Write what belongs into a checkpoint beside model and optimizer, inside :meth:`complete`; all ranks call it.

        Args:
            folder: of the checkpoint; made where it does not exist.
            everywhere: write also what is the same on all ranks, for folders that nodes do not share.
        """
        if self.topk is not None:
            kept = self.topk.state_dict() if self._final is None else self._final.kept
            _write(kept, Path(folder) / KEPT.format(self.rank))
        if self.tables is not None and (everywhere or self.rank == 0):
            _write(self.tables.optimizer.state_dict(), Path(folder) / TABLES)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Read what :meth:`save` has written, by any number of ranks; nothing where there is nothing. Collective."""
        if self.topk is not None:
            own = Path(folder) / KEPT.format(self.rank)
            saved = _read(own) if own.exists() else None
            if saved is not None and saved.get("world_size") == dist.get_world_size(self.ddp.process_group):
                self.topk.load_state_dict(saved)
            elif files := sorted(Path(folder).glob(KEPT.format("*"))):
                self.topk.load_state_dict([_read(path) for path in files])
            elif self.rank == 0:
                logger.info("%s keeps nothing of former gradients: what was left out begins with zero", folder)
        elif self.rank == 0 and next(Path(folder).glob(KEPT.format("*")), None) is not None:
            logger.warning(
                "%s holds what sparse all-reduce has left out of former gradients, and this run has no sparse "
                "all-reduce: it is dropped",
                folder,
            )
        path = Path(folder) / TABLES
        if self.tables is not None and path.exists():
            self.tables.optimizer.load_state_dict(_read(path))

    # -- logs -------------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Numbers of this rank's last step, for logs: seconds waited, MiB sent, and what the hook chose."""
        numbers: dict[str, float] = {}
        if self.dear is not None:
            dear = self.dear.stats()
            numbers |= {"stall_s": dear.stall_s, "sent_mb": dear.sent_bytes / 2**20}
            if dear.fusion_mb is not None:
                numbers["fusion_mb"] = dear.fusion_mb
        if self.topk is not None:
            topk = self.topk.stats()
            numbers |= {"stall_s": topk.stall_s, "sent_mb": topk.sent_bytes / 2**20, "density": topk.density}
        if self.tables is not None:
            rows = self.tables.stats()
            sent_bytes = rows.id_bytes + rows.lookup_bytes + rows.prior_bytes + rows.delayed_bytes
            numbers |= {"tables_stall_s": rows.stall_s, "tables_sent_mb": sent_bytes / 2**20}
        return numbers

    def finish(self) -> None:
        """:meth:`close`, after which the state of the end can still be saved, from memory; collective."""
        optimizer = self.optimizer_state()
        self.consolidate_tables()
        self._final = _Final(optimizer, self.topk.state_dict() if self.topk is not None else {})
        self.close()

    def close(self) -> None:
        """Finish communication; what is spent then says :meth:`ddp_hooks.DearState.close`. Tables stay open."""
        for state in (self.dear, self.topk):
            if state is not None:
                state.close()
        if self.tables is not None:
            self.tables.unfollow()


@contextmanager
def replaced(target: object, name: str, value: Any) -> Iterator[None]:
    """Another attribute of an instance, for a while."""
    own = name in vars(target)
    before = vars(target).get(name)
    setattr(target, name, value)
    try:
        yield
    finally:
        if own:
            setattr(target, name, before)
        else:
            delattr(target, name)


def _read(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def _write(state: dict[str, Any], path: Path) -> None:
    """Whole or not at all, also if the process is killed meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    torch.save(state, partial)
    os.replace(partial, path)
