"""The optimizer's state in the format of plain DDP: gathered to be saved, cut to be loaded.

A saved state does not show that it was sharded: plain DDP can load it, and so can any number of ranks. For
``torch.distributed.checkpoint`` every rank saves its own ranges instead (:mod:`.sharded_checkpoint`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hooks.comm import agree, calling, read_metadata, see
from ddp_hooks.comm.torch_compat.state_dict import StateDictCall
from ddp_hooks.dear.checkpoint.reshard import State
from ddp_hooks.dear.checkpoint.sharded_checkpoint import (
    SETTINGS,
    Settings,
    assemble,
    find_misfit,
    named_entries,
    overlapping_entries,
)
from ddp_hooks.dear.config import DearConfig
from ddp_hooks.dear.layout.memory import ManagedParameters
from ddp_hooks.dear.layout.placement import MASTER_KEY, SHOWN_KEY, ParameterRange, Placement
from ddp_hooks.dear.update.base import Update
from ddp_hooks.dear.update.sharded import ShardedUpdate
from ddp_hooks.dear.update.spread_state import cut_state, refuse_other_shapes
from ddp_hooks.dear.update.spread_tensor import SpreadTensor


class OptimizerCheckpoint:
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        update: Update,
        parameters: ManagedParameters,
        group: dist.ProcessGroup,
        config: DearConfig,
    ) -> None:
        self._optimizer = optimizer
        self._update = update
        self._parameters = parameters
        self._group = group
        self._config = config
        self._rank = dist.get_rank(group)
        self._consolidated: dict[int, State] | None = None  # every parameter's whole state, in its shape
        self._consolidated_on: int | None = None
        self._asked_for: dict[int, State] | None = None  # for the state_dict() that is under way
        self._loaded: tuple[Placement, dict[ParameterRange, State]] | None = None  # by the load_state_dict() under way

    @property
    def _spread(self) -> ShardedUpdate | None:
        """The update, if it spreads the optimizer's state over the ranks at present."""
        return self._update if isinstance(self._update, ShardedUpdate) and not self._update.is_whole else None

    # -- in plain DDP's format ----------------------------------------------------------------------------------------

    def full_state_dict(self) -> dict[str, Any]:
        """Return the full ``state_dict`` on every rank, on the CPU; collective."""
        spread = self._spread
        if spread is None:
            full = self._optimizer.state_dict()
        else:
            full = self._state_dict_of(spread.gather_states(range(dist.get_world_size(self._group))))
        whole: dict[str, Any] = _on_cpu(full)
        return whole

    def consolidate(self, to: int) -> None:
        """Keep the full state on one rank, for ``optimizer.state_dict()`` to return; collective."""
        self.invalidate()
        spread = self._spread
        if spread is not None:
            states = spread.gather_states([to])
            self._consolidated = states if self._rank == to else None
            self._consolidated_on = to

    def invalidate(self) -> None:
        """Drop the consolidated state: the optimizer's has changed."""
        self._consolidated = self._consolidated_on = None

    # -- hooks of the optimizer ---------------------------------------------------------------------------------------

    def before_state_dict(self, _: torch.optim.Optimizer) -> None:
        """Refuse, unless the full state is here or all ranks ask, through torch.distributed.checkpoint."""
        spread, call, holder = self._spread, StateDictCall.current(), self._consolidated_on
        if call is not None and call.loads:  # on all ranks, also where the whole state is
            holder = None
        if spread is None or holder == self._rank:
            return
        if call is None:
            where = f"; it is on rank {holder}" if holder is not None else ""
            raise RuntimeError(
                f"this rank's optimizer holds a shard of its state, so optimizer.state_dict() would save 1/P of it: "
                f"call state.consolidate(to=0) on all ranks after the last step, then optimizer.state_dict() on rank "
                f"0, or state.full_optimizer_state_dict() on all ranks{where}{see('optimizer-state-is-sharded')}"
            )
        if holder is None:
            with calling(f"{call.name}()"):
                self._asked_for = self._ask_all_ranks(spread, call)
        elif call.on_first_rank and dist.get_global_rank(self._group, holder) == 0:
            self._asked_for = {}
        else:  # rank `holder` has it, and asks nobody: it may call this alone, as with plain DDP
            raise RuntimeError(
                f"consolidate() has put the optimizer's state on rank {holder}, which alone can ask for it until the "
                f"next step: call get_state_dict() on rank {holder} only, or on all ranks before consolidate()"
                f"{see('optimizer-state-is-sharded')}"
            )

    def _ask_all_ranks(self, spread: ShardedUpdate, call: StateDictCall) -> dict[int, State]:
        if not call.gathers:
            return spread.spread_states()
        ranks: Sequence[int] = range(dist.get_world_size(self._group))
        if call.on_first_rank:  # of all ranks, not of DDP's group
            ranks = [rank for rank in ranks if dist.get_global_rank(self._group, rank) == 0]
        device = torch.device("cpu") if call.on_first_rank else self._parameters.device
        return {  # where plain DDP has it
            index: {k: v.to(device) if isinstance(v, Tensor) and v.dim() > 0 else v for k, v in state.items()}
            for index, state in spread.gather_states(ranks).items()
        }

    def after_state_dict(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Put the full state in the place of the shards'."""
        asked_for, self._asked_for = self._asked_for, None
        found = asked_for if asked_for is not None else self._consolidated
        return self._state_dict_of(found) if found is not None else state_dict

    def before_load(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """Cut this rank's shards out of a full ``state_dict``, or take them from one that is spread."""
        groups, slots = state_dict["param_groups"], self._update.slots
        spread = any(_spread_in(saved) for saved in state_dict["state"].values())
        if self._torch_may_load(spread):
            self._begin_anew()
            return None
        expected, found = [len(slot) for slot in slots], [len(group["params"]) for group in groups]
        if expected != found:
            raise ValueError(
                f"the optimizer has {len(expected)} param_groups with {expected} parameters, the saved state has "
                f"{len(found)} with {found}: load a state that was saved for this model, by plain DDP or by "
                f"state.full_optimizer_state_dict()"
            )
        ours: dict[int, State] = {}
        others: dict[Any, State] = {}  # by the number of the parameter in the saved state
        for slot_group, saved_group in zip(slots, groups, strict=True):
            for slot, number in zip(slot_group, saved_group["params"], strict=True):
                saved = state_dict["state"].get(number)
                if saved is None:
                    continue
                if isinstance(slot, int):
                    refuse_other_shapes(saved, self._parameters.tensors[slot], self._parameters.names[slot])
                    ours[slot] = saved
                else:
                    others[number] = saved
        self._begin_anew()
        if self._torch_may_load(spread):  # now that nothing is pending
            return None
        self._loaded = self._cut(ours)
        return {**state_dict, "state": others}

    def _torch_may_load(self, spread: bool) -> bool:
        return self._update.is_whole and not self._update.has_masters and not spread

    def _begin_anew(self) -> None:
        self.invalidate()
        self._update.drop_pending_states()

    def after_load(self, _: torch.optim.Optimizer) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            self._update.set_states(*loaded)
        self._update.adopt_loaded_masters()

    # -- sharded ------------------------------------------------------------------------------------------------------

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return this rank's part, as a flat dictionary of tensors for ``torch.distributed.checkpoint``."""
        for slots in self._update.slots:
            for slot in slots:
                if isinstance(slot, Tensor) and self._optimizer.state.get(slot):
                    raise RuntimeError(
                        f"the optimizer also holds a parameter of shape {tuple(slot.shape)} that DDP does not reduce, "
                        f"whose state has no place in a sharded checkpoint: use state.full_optimizer_state_dict()"
                        f"{see('optimizer-state-is-sharded')}"
                    )
        spread = self._spread
        if spread is None:
            states = {}
            for index, parameter in enumerate(self._parameters.tensors):
                elements = ParameterRange(index, 0, parameter.numel())
                states[elements] = cut_state(self._optimizer.state.get(parameter, {}), parameter, elements)
        else:
            _, states = spread.held_states()
        return {**named_entries(states, self._parameters.names), SETTINGS: self._settings().packed()}

    def load_sharded(self, path: str | os.PathLike[str], prefix: str) -> None:
        """Restore this rank's part from a checkpoint of :meth:`sharded_state_dict`, under ``prefix``; collective."""
        metadata, problem = read_metadata(path)
        start = f"{prefix}."
        saved = {name.removeprefix(start): entry for name, entry in metadata.items() if name.startswith(start)}
        if problem is None and SETTINGS not in saved:
            problem = (
                f"{path} has no optimizer state under {prefix!r}, found {sorted({n.split('.')[0] for n in metadata})}: "
                f"save it with torch.distributed.checkpoint.save({{{prefix!r}: state.sharded_optimizer_state_dict()}})"
            )
        problem = problem or find_misfit(saved, dict(zip(self._parameters.names, self._parameters.numels, strict=True)))
        agree({"pieces": sorted(saved)}, problem, self._group, "the checkpoint", self._config)

        size = getattr(saved[SETTINGS], "size", ())
        content = self._load(path, prefix, {SETTINGS: torch.empty(size, dtype=torch.uint8)})
        loaded = self._settings()
        try:
            loaded = Settings.unpacked(content[SETTINGS])
            problem = loaded.difference(self._settings())
        except Exception as error:
            problem = f"{path} has damaged settings of the optimizer: {type(error).__name__}: {error}"
        agree({}, problem, self._group, "the checkpoint", self._config)
        placement = self._update.placement
        ranges = placement.ranges(self._rank)
        entries = self._load(path, prefix, overlapping_entries(saved, ranges, self._parameters.names))
        self.invalidate()
        self._update.set_states(placement, assemble(entries, ranges, self._parameters.names))
        for group, values in zip(self._optimizer.param_groups, loaded.param_groups, strict=True):
            group.update(values)

    def _load(self, path: str | os.PathLike[str], prefix: str, entries: dict[str, Any]) -> dict[str, Any]:
        import torch.distributed.checkpoint as dcp  # takes a while to import, and only this needs it

        template = {prefix: entries}
        dcp.load(template, checkpoint_id=path, process_group=self._group)
        return template[prefix]

    def _settings(self) -> Settings:
        parameters = zip(self._parameters.names, self._parameters.tensors, strict=True)
        layouts = {name: (tuple(p.shape), tuple(p.stride())) for name, p in parameters}
        groups = [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for group in self._optimizer.param_groups
        ]
        return Settings(groups, layouts)

    # -- between the formats ------------------------------------------------------------------------------------------

    def _state_dict_of(self, states: Mapping[int, State]) -> dict[str, Any]:
        """Return the ``state_dict`` that plain DDP would have, with the present settings."""
        whole: dict[int, State] = {}
        groups: list[dict[str, Any]] = []
        position = 0
        for group, slots in zip(self._optimizer.param_groups, self._update.slots, strict=True):
            packed = {key: value for key, value in group.items() if key != "params"}
            groups.append({**packed, "params": list(range(position, position + len(slots)))})
            for slot in slots:
                state = self._optimizer.state.get(slot, {}) if isinstance(slot, Tensor) else states.get(slot, {})
                if state and not _is_plain_copy(state, slot, self._parameters.tensors):
                    whole[position] = state
                position += 1
        return {"state": whole, "param_groups": groups}

    def _cut(self, saved_of: Mapping[int, State]) -> tuple[Placement, dict[ParameterRange, State]]:
        """Return the placement of loaded states, their own or that of the shards, and this rank's part."""
        spread = [tensor for saved in saved_of.values() for tensor in _spread_in(saved)]
        placement = spread[0].placement if spread else self._update.placement
        if any(tensor.placement != placement for tensor in spread):
            raise ValueError(
                "the optimizer's state was put together from states of different moments, between which DDP has "
                "rebuilt its buckets: load what get_state_dict() returned in one call"
            )
        ranges = [elements for elements in placement.ranges(self._rank) if saved_of.get(elements.parameter)]
        tensors = self._parameters.tensors
        return placement, {e: cut_state(saved_of[e.parameter], tensors[e.parameter], e) for e in ranges}


def _is_plain_copy(state: State, slot: int | Tensor, parameters: Sequence[Tensor]) -> bool:
    """Return True if a state is only a master that rounding has not changed: some optimizers expect all or nothing."""
    if not isinstance(slot, int) or not {MASTER_KEY} <= set(state) <= {MASTER_KEY, SHOWN_KEY}:
        return False
    master: Tensor = state[MASTER_KEY]
    if isinstance(master, SpreadTensor):
        return False
    parameter = state.get(SHOWN_KEY, master.to(parameters[slot].dtype))
    return torch.equal(master, parameter.to(master.dtype))


def _spread_in(saved: Any) -> list[SpreadTensor]:
    values = saved.values() if isinstance(saved, Mapping) else []
    return [value for value in values if isinstance(value, SpreadTensor)]


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    return [_on_cpu(item) for item in value] if isinstance(value, list) else value
