"""Saving and loading: whole tables under their names in the model that was not sharded, or every rank its columns."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ddp_hooks.comm import Algorithm, agree, calling, read_metadata, see, torch_compat
from ddp_hooks.embedding.channels import Channels
from ddp_hooks.embedding.columns import gather_columns
from ddp_hooks.embedding.table import Table

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class TableCheckpoint:
    """Makes and reads states of tables and their optimizer.

    Args:
        tables: all of them.
        optimizer: of their weights.
        channels: to the other ranks.
    """

    def __init__(self, tables: Sequence[Table], optimizer: torch.optim.Optimizer, channels: Channels) -> None:
        self._tables = tables
        self._optimizer = optimizer
        self._channels = channels
        self._rank, self._world_size, self._group = channels.rank, channels.world_size, channels.group
        self._saved: dict[str, Any] | None = None  # the optimizer's whole state
        self._passing = False  # whether this module asks for the optimizer's own part

    # -- whole ------------------------------------------------------------------------------------------------------

    def weights(self, to: int | None, device: torch.device) -> list[Tensor] | None:
        """All whole tables, on rank ``to`` or everywhere; collective."""
        gathered = [self._gather(table, table.weight.detach(), to) for table in self._tables]
        return [full.to(device) for full in gathered if full is not None] if to in (None, self._rank) else None

    def optimizer_state(self, to: int | None) -> dict[str, Any] | None:
        """The optimizer's ``state_dict`` as it would be for whole tables, on the CPU; collective."""
        own = self._own_state()
        whole: dict[int, dict[str, Any]] = {}
        for position, table in enumerate(self._in_order()):
            state = own["state"].get(position)
            if state is None:
                continue
            whole[position] = {
                key: self._gather(table, value, to) if self._has_columns(table, value) else _on_host(value)
                for key, value in state.items()
            }
        if to not in (None, self._rank):
            return None
        for state in whole.values():
            for key, value in state.items():
                state[key] = _on_host(value)
        return {**own, "state": whole}

    def keep(self, state: dict[str, Any] | None) -> None:
        """What ``optimizer.state_dict()`` is to return; None: to raise, unless there is one rank only."""
        self._saved = state

    def before_state_dict(self, *_: Any) -> None:
        """A hook of the optimizer."""
        if self._passing:
            return
        self.meet_before_gather()
        if self._world_size > 1 and self._saved is None and not torch_compat.inside_state_dict_api():
            raise RuntimeError(
                "every rank holds some columns of the tables' optimizer state, so one rank alone cannot save it: call "
                "tables.full_optimizer_state_dict() on all ranks, or tables.consolidate() on all ranks and "
                "tables.optimizer.state_dict() on the rank that saves then, before the next step and tables.close()"
                f"{see('optimizer-state-is-sharded')}"
            )

    def meet_before_gather(self) -> None:
        """Let ranks meet if ``torch.distributed.checkpoint.state_dict`` is about to gather what they hold.

        It gathers in a group of torch's, whose waits name nobody, and last half an hour by default.
        """
        call = torch_compat.StateDictCall.current()
        if call is not None and call.gathers:
            with calling(f"{call.name}()"):
                self._channels.meet()

    def after_state_dict(self, _: Any, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """A hook of the optimizer."""
        if self._passing:
            return None
        if self._world_size > 1 and torch_compat.inside_state_dict_api():
            tables = self._in_order()
            state = {
                position: {key: self._spread(tables[position], value) for key, value in values.items()}
                for position, values in state_dict["state"].items()
            }
            return {**state_dict, "state": state}
        return self._saved

    def before_load(self, _: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A hook of the optimizer: cut out this rank's columns."""
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]  # numbers, or names
        table_of = dict(zip(keys, self._in_order(), strict=False))  # torch refuses other numbers of parameters
        state = {
            key: {name: self._cut(table_of[key], name, value) for name, value in values.items()}
            for key, values in state_dict["state"].items()
            if key in table_of
        }
        return {**state_dict, "state": state}

    def _cut(self, table: Table, key: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() < 2:
            return value
        if tuple(value.shape) != (table.num_rows, table.dim):
            raise ValueError(
                f"{key} of {table.name} must have the shape {(table.num_rows, table.dim)} of the whole table, got "
                f"{tuple(value.shape)}: load what tables.full_optimizer_state_dict() has returned"
            )
        return self.own_columns(table, value).contiguous()

    # -- in parts ---------------------------------------------------------------------------------------------------

    def parts(self) -> dict[str, Any]:
        """This rank's columns of weights and state as DTensors, for ``torch.distributed.checkpoint``."""
        own = self._own_state()
        found: dict[str, Any] = {}
        for position, table in enumerate(self._in_order()):
            found[f"{table.name}.weight"] = self._as_dtensor(table, table.weight.detach())
            for key, value in own["state"].get(position, {}).items():
                spread = self._spread(table, value)
                found[f"{table.name}.{key}"] = spread if isinstance(spread, Tensor) else torch.as_tensor(spread)
        found["param_groups"] = own["param_groups"]
        return found

    def load_parts(self, path: str | os.PathLike[str], prefix: str) -> None:
        """Read what :meth:`parts` has made, on any number of ranks; collective."""
        from torch.distributed.checkpoint import load
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        metadata, problem = read_metadata(path)
        keys = [key.removeprefix(f"{prefix}.") for key in metadata if key.startswith(f"{prefix}.")]
        missing = [table.name for table in self._tables if f"{table.name}.weight" not in keys]
        if missing:
            problem = problem or f"{os.fspath(path)} has no table {', '.join(missing)} under {prefix!r}"
        agree({"entries": sorted(keys)}, problem, self._group, "the checkpoint", self._channels.config)
        target: dict[str, Any] = {"param_groups": self._own_state()["param_groups"]}
        for table in self._tables:
            for key in keys:
                if key.rpartition(".")[0] != table.name:
                    continue
                entry = metadata[f"{prefix}.{key}"]
                assert isinstance(entry, TensorStorageMetadata)
                shape = tuple(entry.size)
                if shape == (table.num_rows, table.dim):
                    target[key] = self._as_dtensor(table, torch.zeros_like(table.weight.detach()))
                else:
                    target[key] = torch.zeros(shape, dtype=entry.properties.dtype)
        load({prefix: target}, checkpoint_id=path, process_group=self._group)
        self._install(target)

    def _install(self, loaded: Mapping[str, Any]) -> None:
        template = self._own_state()["state"]
        state: dict[int, dict[str, Any]] = {}
        for position, table in enumerate(self._in_order()):
            for key, value in loaded.items():
                name, _, entry = key.rpartition(".")
                if name != table.name:
                    continue
                local = value.to_local() if hasattr(value, "to_local") else value
                if entry == "weight":
                    with torch.no_grad():
                        table.weight.copy_(local)
                elif local.dim() == 0 and not isinstance(template.get(position, {}).get(entry, 0), Tensor):
                    state.setdefault(position, {})[entry] = local.item()
                else:
                    state.setdefault(position, {})[entry] = local
        self._passing = True
        try:
            self._optimizer.load_state_dict({"state": state, "param_groups": loaded["param_groups"]})
        finally:
            self._passing = False

    def _spread(self, table: Table, value: Any) -> Any:
        """An entry of the state; a DTensor if it has one value per element."""
        return self._as_dtensor(table, value) if self._has_columns(table, value) else value

    def _as_dtensor(self, table: Table, columns: Tensor) -> DTensor:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = DeviceMesh.from_group(self._group, columns.device.type)
        shape = torch.Size((table.num_rows, table.dim))
        return DTensor.from_local(columns, mesh, [Shard(1)], run_check=False, shape=shape, stride=(table.dim, 1))

    def as_dtensor(self, table: Table) -> DTensor:
        """A table as this rank's columns and where the others are; they are those in use, not a copy."""
        return self._as_dtensor(table, table.weight.detach())

    def own_columns(self, table: Table, given: Tensor) -> Tensor:
        """This rank's columns of (num_rows, dim); collective if it is a DTensor that is sharded otherwise."""
        from torch.distributed.tensor import DTensor

        if isinstance(given, DTensor):
            like = self.as_dtensor(table)
            if given.placements == like.placements and given.device_mesh == like.device_mesh:
                return given.to_local()
            given = given.full_tensor()
        return table.cut(given, self._rank)

    # -- parts ------------------------------------------------------------------------------------------------------

    @property
    def loads_parts(self) -> bool:
        """Whether a state of this rank's columns is being loaded."""
        return self._passing

    def _own_state(self) -> dict[str, Any]:
        self._passing = True
        try:
            return self._optimizer.state_dict()
        finally:
            self._passing = False

    def _in_order(self) -> list[Table]:
        """The tables as the optimizer numbers them."""
        table_of = {id(table.weight): table for table in self._tables}
        return [table_of[id(p)] for group in self._optimizer.param_groups for p in group["params"]]

    def _has_columns(self, table: Table, value: Any) -> bool:
        return isinstance(value, Tensor) and value.dim() == 2 and value.shape == table.weight.shape

    def _gather(self, table: Table, columns: Tensor, to: int | None) -> Tensor | None:
        found: list[Tensor | None] = []

        def algorithm() -> Algorithm:
            found.append((yield from gather_columns(table, columns, self._rank, self._world_size, to)))

        self._channels.run_now(algorithm(), f"all columns of {table.name}")
        return found[0]


def _on_host(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value
