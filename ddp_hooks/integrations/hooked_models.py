"""DDP models in somebody else's loop: :class:`HookedModel` is one with its optimizer, :class:`HookedModels` are all."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks.comm import see
from ddp_hooks.comm.torch_compat.ddp import managed_parameters
from ddp_hooks.dear import DearConfig, DearState, GradScaler, clip_grad_norm_, dear_hook
from ddp_hooks.embedding import EmbeddingTables
from ddp_hooks.integrations.settings import Dense
from ddp_hooks.intercept.co_optimizers import co_optimizers_in
from ddp_hooks.quantized import QuantizedConfig, QuantizedState, quantized_hook
from ddp_hooks.topk import TopKState, topk_hook

logger = logging.getLogger("ddp_hooks")

RESIDUAL_FILE = "ddp_hooks_rank{}.bin"  # of a checkpoint: what rounding or selection has left out on one rank
TABLES_FILE = "ddp_hooks_tables.bin"  # of a checkpoint: state of the tables' optimizer


@contextmanager
def replaced(target: object, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of an instance; its former value, or that of its class, returns at the end."""
    before = {name: vars(target)[name]} if name in vars(target) else {}
    setattr(target, name, value)
    try:
        yield
    finally:
        delattr(target, name)
        vars(target).update(before)


def scaler_like(stock: torch.amp.GradScaler) -> GradScaler:
    """Return a :class:`~ddp_hooks.GradScaler` with the settings and the scale of a scaler of torch."""
    ours: Any = copy.copy(stock)
    ours.__class__ = GradScaler
    return ours


def tables_of(model: nn.Module) -> EmbeddingTables | None:
    return next((found for found in co_optimizers_in(model) if isinstance(found, EmbeddingTables)), None)


class HookedModel:
    """DDP model whose gradients travel by a hook, or beside tables (``dense=None``) by DDP's own all-reduce."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        dense: Dense | None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.ddp = ddp
        self.optimizer = optimizer
        self.rank = dist.get_rank(ddp.process_group)
        self.tables = tables_of(ddp.module)
        self.dear: DearState | None = None
        self.feedback: TopKState | QuantizedState | None = None  # keeps residuals
        if isinstance(dense, DearConfig):
            self.dear = DearState(ddp, optimizer, dense, saved_by_loop=True)
            ddp.register_comm_hook(self.dear, dear_hook)
        elif isinstance(dense, QuantizedConfig):
            self.feedback = QuantizedState(ddp, dense, scaler=scaler)
            ddp.register_comm_hook(self.feedback, quantized_hook)
        elif dense is not None:
            self.feedback = TopKState(ddp, dense, scaler=scaler, optimizer=optimizer)
            ddp.register_comm_hook(self.feedback, topk_hook)
        self.state = self.dear or self.feedback
        if self.tables is not None and self.dear is None:
            self.tables.follow(optimizer)
        self._final_optimizer: dict[str, Any] | None = None  # for checkpoints after communication has ended
        self._final_residual: dict[str, Any] = {}
        self._parameters = {id(parameter) for parameter in managed_parameters(ddp).values()}

    def owns(self, parameter: Tensor) -> bool:
        return id(parameter) in self._parameters

    # -- gradients --------------------------------------------------------------------------------------------------

    def sources(self, parameters: Sequence[Tensor]) -> list[Any]:
        """Return the sources for :func:`~ddp_hooks.clip_grad_norm_` of these parameters of the model; collective."""
        if self.dear is not None:
            missing = len(self._parameters.difference(map(id, parameters)))
            if missing:
                raise ValueError(
                    f"clipping was asked for {len(self._parameters) - missing} of the model's "
                    f"{len(self._parameters)} trained parameters, but ranks hold shards of all of them: pass "
                    f"model.parameters(){see('in-a-trainer')}"
                )
            return [self.dear]
        if isinstance(self.feedback, TopKState):
            self.feedback.wait_for_gradients()
        return [list(parameters), *([self.tables] if self.tables is not None else [])]

    def clip_grad_value_(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        self.sources(parameters)  # checks them, and waits
        if self.dear is not None:
            self.dear.clip_grad_value_(clip_value)
            return
        nn.utils.clip_grad_value_(parameters, clip_value)
        if self.tables is not None:
            with self.tables.reduced_gradients() as holders:
                for holder in holders:
                    nn.utils.clip_grad_value_(holder, clip_value)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's complete ``state_dict``; with DeAR on the first rank, {} on others. Collective."""
        if self._final_optimizer is not None:
            return self._final_optimizer
        if self.feedback is not None:
            self.feedback.synchronize()
        if self.dear is not None:
            self.dear.consolidate()
        return self.optimizer.state_dict() if self.dear is None or self.rank == 0 else {}

    def consolidate_tables(self, everywhere: bool = False) -> None:
        if self.tables is not None:
            self.tables.consolidate(None if everywhere else 0)

    @contextmanager
    def complete(self, everywhere: bool = False) -> Iterator[None]:
        """Make the ``state_dict`` of optimizer and tables complete on the first rank, or ``everywhere``; collective."""
        with ExitStack() as stack:
            if self.dear is not None:
                state = self.dear.full_optimizer_state_dict() if everywhere else self.optimizer_state()
                stack.enter_context(replaced(self.optimizer, "state_dict", lambda: state))
            if self.feedback is not None:
                self.feedback.synchronize()
            self.consolidate_tables(everywhere)
            yield

    def save(self, folder: str | os.PathLike[str], everywhere: bool = False) -> None:
        """Write the files beside model and optimizer, inside :meth:`complete`; ``everywhere``: also equal ones."""
        if self.feedback is not None:
            _write(self._final_residual or self.feedback.state_dict(), Path(folder) / RESIDUAL_FILE.format(self.rank))
        if self.tables is not None and (everywhere or self.rank == 0):
            _write(self.tables.optimizer.state_dict(), Path(folder) / TABLES_FILE)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Read the files of :meth:`save`, written by any number of ranks; missing ones are skipped. Collective."""
        self._load_residuals(Path(folder))
        path = Path(folder) / TABLES_FILE
        if self.tables is not None and path.exists():
            self.tables.optimizer.load_state_dict(_read(path))

    def _load_residuals(self, folder: Path) -> None:
        own = folder / RESIDUAL_FILE.format(self.rank)
        files = sorted(folder.glob(RESIDUAL_FILE.format("*")))
        first = _read(own if own in files else files[0]) if files and self.feedback is not None else {}
        if self.feedback is not None and ("runs" in first) == isinstance(self.feedback, QuantizedState) and files:
            is_own = own in files and first.get("world_size") == dist.get_world_size(self.ddp.process_group)
            self.feedback.load_state_dict(first if is_own else [_read(path) for path in files])
        elif files and self.rank == 0:
            logger.warning("%s has residuals of another hook than this run has: they are dropped", folder)
        elif self.feedback is not None and self.rank == 0:
            logger.info("%s has no residuals of gradients: they begin with zero", folder)

    def stats(self) -> dict[str, float]:
        """Return statistics of this rank's last step: seconds waited, MiB sent, and the hook's choices."""
        numbers: dict[str, float] = {}
        if self.state is not None:
            step = self.state.stats()
            numbers = {"stall_s": step.stall_s, "sent_mb": step.sent_bytes / 2**20}
            for choice in ("fusion_mb", "density", "relative_error"):
                if getattr(step, choice, None) is not None:
                    numbers[choice] = getattr(step, choice)
        if self.tables is not None:
            rows = self.tables.stats()
            sent_bytes = rows.id_bytes + rows.lookup_bytes + rows.prior_bytes + rows.delayed_bytes
            numbers |= {"tables_stall_s": rows.stall_s, "tables_sent_mb": sent_bytes / 2**20}
        return numbers

    def close(self, keep_state: bool = False) -> None:
        """End communication, but for tables; with ``keep_state`` the state can still be saved (a collective call)."""
        if keep_state:
            self._final_optimizer = self.optimizer_state()
            self.consolidate_tables()
            self._final_residual = self.feedback.state_dict() if self.feedback is not None else {}
        if self.state is not None:
            self.state.close()
        if self.tables is not None:
            self.tables.unfollow()


class HookedModels:
    """All models of a loop. Each gets its hook as soon as its optimizer is known."""

    def __init__(self, dense: Dense | None) -> None:
        self.dense = dense
        self._hooked: list[HookedModel] = []
        self._waiting: dict[DistributedDataParallel, Any] = {}  # model without optimizer -> handle of its guard
        self._is_complete = False  # inside of complete()

    def __iter__(self) -> Iterator[HookedModel]:
        return iter(self._hooked)

    def expect(self, ddp: DistributedDataParallel) -> None:
        """Add a model; to train it before :meth:`bind` has found its optimizer raises a RuntimeError."""
        if ddp not in self._waiting and all(model.ddp is not ddp for model in self._hooked):
            self._waiting[ddp] = ddp.register_forward_pre_hook(_refuse_without_optimizer)

    def bind(
        self, optimizers: Iterable[torch.optim.Optimizer], scaler: torch.amp.GradScaler | None = None
    ) -> list[HookedModel]:
        """Register hooks of models whose parameters are in one of the optimizers; return these models. Collective."""
        known, made = list(optimizers), []
        for ddp, guard in list(self._waiting.items()):
            optimizer = self._optimizer_of(ddp, known)
            if optimizer is not None:
                made.append(HookedModel(ddp, optimizer, self.dense, scaler))
                guard.remove()
                del self._waiting[ddp]
        self._hooked += made
        return made

    def _optimizer_of(
        self, ddp: DistributedDataParallel, optimizers: Sequence[torch.optim.Optimizer]
    ) -> torch.optim.Optimizer | None:
        """Return the optimizer of all parameters; for hooks that need no optimizer, the first one with some of them."""
        wanted = {id(parameter) for parameter in managed_parameters(ddp).values()}
        needs_none = getattr(self.dense, "pipeline", None) == "backward" or isinstance(self.dense, QuantizedConfig)
        takes_any = needs_none and tables_of(ddp.module) is None
        for optimizer in optimizers:
            held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            if wanted <= held or (takes_any and wanted & held):
                return optimizer
        return None

    def of(self, optimizer: torch.optim.Optimizer) -> list[HookedModel]:
        return [model for model in self._hooked if model.optimizer is optimizer]

    def release(self, but: nn.Module | None = None) -> None:
        """End communication and forget all models, ``but`` one; all ranks call it."""
        for ddp in [ddp for ddp in self._waiting if ddp.module is not but]:
            self._waiting.pop(ddp).remove()
        for model in [model for model in self._hooked if model.ddp.module is not but]:
            self._hooked.remove(model)
            model.close()

    def synchronize(self) -> None:
        for model in self._hooked:
            if model.state is not None:
                model.state.synchronize()

    def stats(self) -> dict[str, float]:
        total: dict[str, float] = {}
        for model in self._hooked:
            for name, value in model.stats().items():
                total[f"ddp_hooks/{name}"] = total.get(f"ddp_hooks/{name}", 0.0) + value
        return total

    # -- gradients --------------------------------------------------------------------------------------------------

    def clip_grad_norm(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, **how: Any
    ) -> Tensor:
        """Clip the common norm of gradients, of these models and of others; collective."""
        shares, rest = self._split(parameters)
        if not shares:
            return nn.utils.clip_grad_norm_(rest, max_norm, norm_type, **how)
        sources = [source for model, own in shares for source in model.sources(own)]
        return clip_grad_norm_([*sources, rest], max_norm, norm_type, **how).float()

    def clip_grad_value(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        shares, rest = self._split(parameters)
        for model, own in shares:
            model.clip_grad_value_(own, clip_value)
        if rest:
            nn.utils.clip_grad_value_(rest, clip_value)

    def _split(self, parameters: Iterable[Tensor]) -> tuple[list[tuple[HookedModel, list[Tensor]]], list[Tensor]]:
        """Split parameters by their models; return also the parameters of no model."""
        shares, rest = [], list(parameters)
        for model in self._hooked:
            own = [parameter for parameter in rest if model.owns(parameter)]
            if own:
                shares.append((model, own))
                rest = [parameter for parameter in rest if not model.owns(parameter)]
        return shares, rest

    # -- checkpoints ------------------------------------------------------------------------------------------------

    @contextmanager
    def complete(self, everywhere: bool = False) -> Iterator[None]:
        with ExitStack() as stack:
            for model in self._hooked:
                stack.enter_context(model.complete(everywhere))
            stack.enter_context(replaced(self, "_is_complete", True))
            yield

    def model_state(self, state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return ``state_dict()`` of a model; with sharded tables on the first rank, {} on others. Collective."""
        if not self._is_complete:
            self.consolidate_tables()
        return state_dict() if all(model.tables is None or model.tables.is_whole for model in self._hooked) else {}

    def consolidate_tables(self, everywhere: bool = False) -> None:
        for model in self._hooked:
            model.consolidate_tables(everywhere)

    def save(self, folder: str | Path, everywhere: bool = False) -> None:
        for number, model in enumerate(self._hooked):
            model.save(_numbered(folder, number), everywhere)

    def load(self, folder: str | Path) -> None:
        for number, model in enumerate(self._hooked):
            model.load(_numbered(folder, number))

    def close(self) -> None:
        """End communication; the present state can still be saved. Collective."""
        for model in self._hooked:
            model.close(keep_state=True)


def _numbered(folder: str | Path, number: int) -> Path:
    return Path(folder) if number == 0 else Path(folder) / f"ddp_hooks_{number}"


def _refuse_without_optimizer(module: nn.Module, *_: Any) -> None:
    if module.training and torch.is_grad_enabled():
        raise RuntimeError(
            f"this model was prepared, but no single optimizer with all of its trained parameters, which hooks and "
            f"tables step with: prepare (or set up) one optimizer of model.parameters(), with several param_groups if "
            f"need be{see('in-a-trainer')}"
        )


def _read(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def _write(state: dict[str, Any], path: Path) -> None:
    """Write the file whole or not at all, also if the process is killed meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    torch.save(state, partial)
    os.replace(partial, path)
