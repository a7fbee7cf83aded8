"""Saving and loading: whole tables under their names in the unsharded model, or every rank its columns."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ddp_hooks.comm import Algorithm, agree, calling, read_metadata, see
from ddp_hooks.comm.torch_compat.state_dict import StateDictCall, inside_state_dict_api, optimizers_beside_model
from ddp_hooks.embedding.step.scheduler import StepScheduler
from ddp_hooks.embedding.table import Table, gather_columns

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

logger = logging.getLogger("ddp_hooks")


class TableCheckpoint:
    """Reads and writes weights and optimizer state of tables; methods are those of ``EmbeddingTables``."""

    def __init__(
        self, model: nn.Module, tables: Sequence[Table], optimizer: torch.optim.Optimizer, scheduler: StepScheduler
    ) -> None:
        self._model = model
        self._tables = tables
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._channels = channels = scheduler.channels
        self._rank, self._world_size, self._group = channels.rank, channels.world_size, channels.group
        self.kept_weights: list[Tensor] | None = None  # whole tables, until the next step
        self._kept_state: dict[str, Any] | None = None  # the optimizer's whole state, until the next step
        self._wants_columns = False  # this object asks for, or loads, the optimizer's own columns
        self._has_warned = False
        # These hooks stay when the tables are closed: one rank's columns are never the whole state.
        optimizer.register_state_dict_pre_hook(self._before_state_dict)
        optimizer.register_state_dict_post_hook(self._after_state_dict)
        optimizer.register_load_state_dict_pre_hook(self._before_load_state_dict)

    # -- whole tables

    def gather_weights(self, to: int | None, device: torch.device) -> list[Tensor] | None:
        gathered = [self._gather(table, table.weight.detach(), to) for table in self._tables]
        return [full.to(device) for full in gathered if full is not None] if to in (None, self._rank) else None

    def gather_optimizer_state(self, to: int | None) -> dict[str, Any] | None:
        def whole(table: Table, key: str, value: Any) -> Any:
            value = self._gather(table, value, to) if _has_columns(table, value) else value
            return value.detach().cpu().clone() if isinstance(value, Tensor) else value

        gathered = self._map_state(self._own_state(), whole)
        return gathered if to in (None, self._rank) else None

    def full_state_dict(self) -> dict[str, Any]:
        before, self.kept_weights = self.kept_weights, self.gather_weights(None, torch.device("cpu"))
        try:
            state: dict[str, Any] = self._model.state_dict()
        finally:
            self.kept_weights = before
        return state

    def consolidate(self, to: int | None) -> None:
        self.kept_weights = self.gather_weights(to, torch.device("cpu"))
        self._kept_state = self.gather_optimizer_state(to)

    def discard_whole(self) -> None:
        self.kept_weights = self._kept_state = None

    def discard_old(self) -> None:
        self._scheduler.lookups.discard_ahead()
        self.discard_whole()

    # -- weights of modules

    def weight_of(self, table: Table, caller: str) -> Tensor:
        """Return a whole table, or a DTensor for FSDP2 and ``torch.distributed.checkpoint.state_dict``."""
        if self._scheduler.local_tables is not None:
            return self._scheduler.local_tables[table.index]
        if self.kept_weights is not None and not inside_state_dict_api():
            return self.kept_weights[table.index]
        is_closed = self._scheduler.closed
        if self._world_size == 1:
            self._scheduler.split_step.flush()
            return table.weight.detach()
        if not is_closed and (_is_sharded_by_fsdp2(self._model) or inside_state_dict_api()):
            self._scheduler.split_step.flush()
            return self._as_dtensor(table, table.weight.detach())
        rank = self._channels.ranks[self._rank]
        if is_closed:
            raise RuntimeError(
                f"{caller}: the tables were closed, and rank {rank} has kept some columns of {table.name} only: call "
                f"tables.full_state_dict() on all ranks before tables.close(){see('the-state-was-closed')}"
            )
        raise RuntimeError(
            f"{caller}: rank {rank} has some columns of {table.name} only, and to gather the others takes all ranks. "
            f"To save call tables.full_state_dict() on all ranks, or tables.consolidate() on all ranks and "
            f"state_dict() on the rank that saves then, before the next step; to evaluate or read weights use "
            f"tables.local() on all ranks{see('tables-are-sharded')}"
        )

    def weight_to_save(self, table: Table) -> Tensor:
        if self._scheduler.local_tables is None:
            self._meet_before_gather()
        return self.weight_of(table, "state_dict()")

    def load_weight(self, table: Table, full: Tensor) -> None:
        """Copy this rank's columns of (num_rows, dim); collective for a DTensor."""
        if self._scheduler.local_tables is not None:
            raise RuntimeError(
                "weights were loaded inside of tables.local(), where tables are copies: leave it before"
                f"{see('called-at-the-wrong-moment')}"
            )
        self._scheduler.split_step.flush()
        self.discard_old()
        columns = self._own_columns(table, full)
        with torch.no_grad():
            table.weight.copy_(columns)

    def convert(self, table: Table, function: Callable[[Tensor], Tensor]) -> None:
        self._scheduler.split_step.flush()
        self.discard_old()
        weight = table.weight
        with torch.no_grad():
            converted = function(weight.data)
        if converted.device != weight.device:
            raise RuntimeError(
                f"sharded tables cannot move from {weight.device} to {converted.device}: move the model before "
                f"shard_embeddings(){see('storage-was-replaced')}"
            )
        weight.data = converted

    # -- columns of this rank, for torch.distributed.checkpoint

    def sharded_state_dict(self) -> dict[str, Any]:
        own = self._map_state(self._own_state(), self._as_dtensor_if_columns)
        found: dict[str, Any] = {"param_groups": own["param_groups"]}
        for position, table in enumerate(self._in_optimizer_order()):
            found[f"{table.name}.weight"] = self._as_dtensor(table, table.weight.detach())
            for key, value in own["state"].get(position, {}).items():
                found[f"{table.name}.{key}"] = value if isinstance(value, Tensor) else torch.as_tensor(value)
        return found

    def load_sharded(self, path: str | os.PathLike[str], prefix: str) -> None:
        from torch.distributed.checkpoint import load
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        metadata, problem = read_metadata(path)
        keys = [key.removeprefix(f"{prefix}.") for key in metadata if key.startswith(f"{prefix}.")]
        missing = [table.name for table in self._tables if f"{table.name}.weight" not in keys]
        if missing:
            problem = problem or f"{os.fspath(path)} has no table {', '.join(missing)} under {prefix!r}"
        agree({"entries": sorted(keys)}, problem, self._group, "the checkpoint", self._channels.config)
        own = self._own_state()
        target: dict[str, Any] = {"param_groups": own["param_groups"]}
        entries = [
            (key, position, table, key.rpartition(".")[2])
            for position, table in enumerate(self._in_optimizer_order())
            for key in keys
            if key.rpartition(".")[0] == table.name
        ]
        for key, _, table, _ in entries:
            stored = metadata[f"{prefix}.{key}"]
            assert isinstance(stored, TensorStorageMetadata)
            if tuple(stored.size) == table.shape:
                target[key] = self._as_dtensor(table, torch.zeros_like(table.weight.detach()))
            else:
                target[key] = torch.zeros(stored.size, dtype=stored.properties.dtype)
        load({prefix: target}, checkpoint_id=path, process_group=self._group)
        state: dict[int, dict[str, Any]] = {}
        for key, position, table, entry in entries:
            value = target[key].to_local() if tuple(target[key].shape) == table.shape else target[key]
            if entry == "weight":
                with torch.no_grad():
                    table.weight.copy_(value)
                continue
            is_number = value.dim() == 0 and not isinstance(own["state"].get(position, {}).get(entry, 0), Tensor)
            state.setdefault(position, {})[entry] = value.item() if is_number else value
        with self._own_columns_only():
            self._optimizer.load_state_dict({"state": state, "param_groups": target["param_groups"]})

    # -- hooks of the optimizer

    def _before_state_dict(self, *_: Any) -> None:
        self._scheduler.split_step.flush()
        if self._wants_columns:
            return
        self._meet_before_gather()
        if self._world_size > 1 and self._kept_state is None and not inside_state_dict_api():
            raise RuntimeError(
                "every rank holds some columns of the tables' optimizer state, so one rank alone cannot save it: call "
                "tables.full_optimizer_state_dict() on all ranks, or tables.consolidate() on all ranks and "
                "tables.optimizer.state_dict() on the rank that saves then, before the next step and tables.close()"
                f"{see('optimizer-state-is-sharded')}"
            )

    def _after_state_dict(self, _: Any, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        if self._wants_columns:
            return None
        if self._world_size > 1 and inside_state_dict_api():
            return self._map_state(state_dict, self._as_dtensor_if_columns)
        return self._kept_state

    def _before_load_state_dict(self, _: Any, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        self._scheduler.split_step.flush()
        self.discard_whole()
        return None if self._wants_columns else self._map_state(state_dict, self._cut)

    def _cut(self, table: Table, key: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() < 2:
            return value
        if tuple(value.shape) != table.shape:
            raise ValueError(
                f"{key} of {table.name} must have the shape {table.shape} of the whole table, got "
                f"{tuple(value.shape)}: load what tables.full_optimizer_state_dict() has returned"
            )
        return self._own_columns(table, value).contiguous()

    def _meet_before_gather(self) -> None:
        # torch.distributed.checkpoint.state_dict gathers columns in a group of torch's, whose waits name nobody and
        # last half an hour by default.
        call = StateDictCall.current()
        if call is not None and call.gathers:
            with calling(f"{call.name}()"):
                self._channels.meet()

    def warn_if_left_out(self) -> None:
        """Warn, once, if ``get_state_dict()`` or ``set_state_dict()`` was not given the tables' optimizer."""
        call, optimizers = optimizers_beside_model()
        has_state = not isinstance(self._optimizer, torch.optim.SGD)  # momentum is refused
        if not optimizers or self._optimizer in optimizers or self._has_warned or not has_state:
            return
        self._has_warned = True
        logger.warning(
            "%s() was given optimizers without that of the sharded tables %s, whose state it leaves out; a run that "
            "resumes would begin with a new one. Call get_state_dict(model, [optimizer, tables.optimizer]), and "
            "set_state_dict() likewise%s",
            call,
            ", ".join(table.name for table in self._tables),
            see("optimizer-state-is-sharded"),
        )

    # -- columns

    @contextmanager
    def _own_columns_only(self) -> Iterator[None]:
        self._wants_columns = True
        try:
            yield
        finally:
            self._wants_columns = False

    def _own_state(self) -> dict[str, Any]:
        with self._own_columns_only():
            return self._optimizer.state_dict()

    def _map_state(self, state_dict: dict[str, Any], change: Callable[[Table, str, Any], Any]) -> dict[str, Any]:
        """Return the optimizer's ``state_dict`` with every entry of its state changed, in the optimizer's order."""
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]  # numbers, or names
        table_of = dict(zip(keys, self._in_optimizer_order(), strict=False))  # torch refuses other numbers of them
        state = {
            key: {name: change(table, name, value) for name, value in state_dict["state"][key].items()}
            for key, table in table_of.items()
            if key in state_dict["state"]
        }
        return {**state_dict, "state": state}

    def _own_columns(self, table: Table, given: Tensor) -> Tensor:
        """Return this rank's columns of (num_rows, dim); collective for a DTensor with another placement."""
        from torch.distributed.tensor import DTensor

        if isinstance(given, DTensor):
            like = self._as_dtensor(table, table.weight.detach())
            if given.placements == like.placements and given.device_mesh == like.device_mesh:
                return given.to_local()
            given = given.full_tensor()
        return table.cut(given, self._rank)

    def _in_optimizer_order(self) -> list[Table]:
        table_of = {id(table.weight): table for table in self._tables}
        return [table_of[id(p)] for group in self._optimizer.param_groups for p in group["params"]]

    def _as_dtensor(self, table: Table, columns: Tensor) -> DTensor:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = DeviceMesh.from_group(self._group, columns.device.type)
        shape = torch.Size(table.shape)
        return DTensor.from_local(columns, mesh, [Shard(1)], run_check=False, shape=shape, stride=(table.dim, 1))

    def _as_dtensor_if_columns(self, table: Table, _: str, value: Any) -> Any:
        return self._as_dtensor(table, value) if _has_columns(table, value) else value

    def _gather(self, table: Table, columns: Tensor, to: int | None) -> Tensor | None:
        found: list[Tensor | None] = []

        def algorithm() -> Algorithm:
            found.append((yield from gather_columns(table, columns, to)))

        self._channels.run("columns", algorithm(), f"all columns of {table.name}").wait()
        return found[0]


def _has_columns(table: Table, value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and value.shape == table.weight.shape


def _is_sharded_by_fsdp2(model: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())
