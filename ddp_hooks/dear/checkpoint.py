"""The optimizer's state in the format of plain DDP: gathered to be saved, cut to be loaded.

What is saved never shows that it was sharded: plain DDP can load it, and so can any number of ranks. For
``torch.distributed.checkpoint`` every rank saves its own pieces instead (:mod:`~ddp_hooks.dear.pieces`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hooks.comm import agree, read_metadata, see, shaped_like
from ddp_hooks.dear.arrangement import Arrangement
from ddp_hooks.dear.layout import Interval
from ddp_hooks.dear.moves import State
from ddp_hooks.dear.order import SumOrder, take_order
from ddp_hooks.dear.pieces import SETTINGS, Settings, assemble, find_misfit, named_pieces, overlapping_pieces
from ddp_hooks.dear.replicated import ReplicatedOptimizer
from ddp_hooks.dear.sharded import ShardedOptimizer, cut_entry
from ddp_hooks.dear.shards import MASTER_KEY


class OptimizerCheckpoint:
    """Stands between an optimizer that holds shards and whoever saves or loads it.

    Args:
        optimizer: the user's.
        sharded: its shards, and where its state is.
        arrangement: the layout in force.
        parameters: the parameters that are reduced, in a fixed order.
        names: their names.
        group: the ranks of the DDP module.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        sharded: ShardedOptimizer | ReplicatedOptimizer,
        arrangement: Arrangement,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        group: dist.ProcessGroup,
    ) -> None:
        self._optimizer = optimizer
        self._sharded = sharded
        self._arrangement = arrangement
        self._parameters = parameters
        self._names = names
        self._group = group
        self._rank = dist.get_rank(group)
        self._consolidated: dict[int, State] | None = None  # every parameter's whole state
        self._consolidated_on: int | None = None
        order = take_order(optimizer.param_groups)
        if order is not None:  # a state was loaded before there was anybody to take it out
            arrangement.resume(order)

    @property
    def _spread(self) -> ShardedOptimizer | None:
        """Who holds this rank's part of the state, if it is spread over the ranks."""
        if isinstance(self._sharded, ReplicatedOptimizer) or self._sharded.is_whole:
            return None
        return self._sharded

    # -- in plain DDP's format ----------------------------------------------------------------------------------------

    def gather(self, ranks: Sequence[int]) -> dict[str, Any] | None:
        """The full ``state_dict`` on the ranks in ``ranks``, None on the others; collective."""
        spread = self._spread
        if spread is None:
            return _on_cpu(self._optimizer.state_dict()) if self._rank in ranks else None
        states = spread.gather_states(self._arrangement.layout, ranks)
        return _on_cpu(self._state_dict_of(states)) if self._rank in ranks else None

    def consolidate(self, to: int) -> None:
        """Keep the full state on one rank, for ``optimizer.state_dict()`` to return; collective."""
        self.outdate()
        spread = self._spread
        if spread is not None:
            states = spread.gather_states(self._arrangement.layout, [to])
            self._consolidated = states if self._rank == to else None
            self._consolidated_on = to

    def outdate(self) -> None:
        """The state has changed: what was consolidated is no longer what is."""
        self._consolidated = self._consolidated_on = None

    # -- hooks of the optimizer ---------------------------------------------------------------------------------------

    def before_state_dict(self, _: torch.optim.Optimizer) -> None:
        """Raise unless the full state is here."""
        if not self._sharded.is_whole and self._consolidated is None:
            where = f"; it is on rank {self._consolidated_on}" if self._consolidated_on is not None else ""
            raise RuntimeError(
                f"this rank's optimizer holds a shard of its state, so optimizer.state_dict() would save 1/P of it: "
                f"call state.consolidate(to=0) on all ranks after the last step, then optimizer.state_dict() on rank "
                f"0, or state.full_optimizer_state_dict() on all ranks{where}{see('optimizer-state-is-sharded')}"
            )

    def after_state_dict(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Put the full state in the place of the shards', and say in which order sums were formed."""
        if self._consolidated is not None:
            return self._state_dict_of(self._consolidated)
        return self._with_order(state_dict)

    def before_load(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Cut this rank's shards out of a full ``state_dict``; raises ValueError if it is not one of this model."""
        order, state_dict = SumOrder.taken_from(state_dict)
        if self._sharded.is_whole and not self._sharded.has_masters:  # torch looks at it
            self._begin_anew(order)
            return state_dict
        slots, groups = self._sharded.slots.groups, state_dict["param_groups"]
        expected, found = [len(slot) for slot in slots], [len(group["params"]) for group in groups]
        if expected != found:
            raise ValueError(
                f"the optimizer has {len(expected)} param_groups with {expected} parameters, the saved state has "
                f"{len(found)} with {found}: load a state that was saved for this model, by plain DDP or by "
                f"state.full_optimizer_state_dict()"
            )
        pairs = [
            (slot, saved_id)
            for slot_group, saved_group in zip(slots, groups, strict=True)
            for slot, saved_id in zip(slot_group, saved_group["params"], strict=True)
        ]
        saved_of = {slot: state_dict["state"].get(saved_id) for slot, saved_id in pairs}
        for slot, saved in saved_of.items():
            if isinstance(slot, int) and saved is not None:
                self._refuse_other_shapes(saved, slot)
        self._begin_anew(order)
        if self._sharded.is_whole and not self._sharded.has_masters:
            return state_dict
        if self._sharded.is_whole:
            self._keep_for_masters(saved_of)
            others = {i: saved_of[slot] for slot, i in pairs if isinstance(slot, Tensor) and saved_of[slot] is not None}
            return {**state_dict, "state": others}
        return self._cut(state_dict, saved_of)

    def _begin_anew(self, order: SumOrder | None) -> None:
        """Nothing that was saved or loaded before counts any more."""
        self.outdate()
        self._sharded.drop_early_states()
        if order is not None:
            self._arrangement.resume(order)

    def after_load(self, _: torch.optim.Optimizer) -> None:
        """Put masters where they belong."""
        self._sharded.adopt_loaded_masters()

    # -- in pieces ----------------------------------------------------------------------------------------------------

    def pieces(self) -> dict[str, Any]:
        """This rank's part, as a flat dictionary of tensors for ``torch.distributed.checkpoint``."""
        for slots in self._sharded.slots.groups:
            for slot in slots:
                if isinstance(slot, Tensor) and self._optimizer.state.get(slot):
                    raise RuntimeError(
                        f"the optimizer also holds a parameter of shape {tuple(slot.shape)} that DDP does not reduce, "
                        f"whose state has no place in a sharded checkpoint: use state.full_optimizer_state_dict()"
                        f"{see('optimizer-state-is-sharded')}"
                    )
        spread = self._spread
        if spread is None:
            intervals = [Interval(index, 0, numel) for index, numel in enumerate(self._sharded.numels)]
            states = {interval: self._whole_state(interval) for interval in intervals}
        else:
            _, states = spread.held_states(self._arrangement.layout)
        return {**named_pieces(states, self._names), SETTINGS: self._settings().packed()}

    def load_pieces(self, path: str | os.PathLike[str], prefix: str) -> None:
        """Restore this rank's part from a checkpoint that :meth:`pieces` went into, under ``prefix``; collective."""
        metadata, problem = read_metadata(path)
        start = f"{prefix}."
        saved = {name.removeprefix(start): entry for name, entry in metadata.items() if name.startswith(start)}
        if problem is None and SETTINGS not in saved:
            problem = (
                f"{path} has no optimizer state under {prefix!r}, found {sorted({n.split('.')[0] for n in metadata})}: "
                f"save it with torch.distributed.checkpoint.save({{{prefix!r}: state.sharded_optimizer_state_dict()}})"
            )
        problem = problem or find_misfit(saved, dict(zip(self._names, self._sharded.numels, strict=True)))
        agree({"pieces": sorted(saved)}, problem, self._group, "the checkpoint")

        size = getattr(saved[SETTINGS], "size", ())
        content = self._load(path, prefix, {SETTINGS: torch.empty(size, dtype=torch.uint8)})
        loaded = self._settings()
        try:
            loaded = Settings.unpacked(content[SETTINGS])
            problem = loaded.difference(self._settings())
        except Exception as error:
            problem = f"{path} has damaged settings of the optimizer: {type(error).__name__}: {error}"
        agree({}, problem, self._group, "the checkpoint")
        placement = self._sharded.placement(self._arrangement.layout)
        intervals = placement.intervals(self._rank)
        pieces = self._load(path, prefix, overlapping_pieces(saved, intervals, self._names))
        self.outdate()
        self._sharded.set_states(placement, assemble(pieces, intervals, self._names))
        for group, values in zip(self._optimizer.param_groups, loaded.param_groups, strict=True):
            group.update(values)
        if loaded.order is not None:
            self._arrangement.resume(SumOrder.unpacked(loaded.order))

    def _load(self, path: str | os.PathLike[str], prefix: str, entries: dict[str, Any]) -> dict[str, Any]:
        import torch.distributed.checkpoint as dcp  # takes a while to import, and only this needs it

        template = {prefix: entries}
        dcp.load(template, checkpoint_id=path, process_group=self._group)
        return template[prefix]

    def _settings(self) -> Settings:
        layouts = {n: (tuple(p.shape), tuple(p.stride())) for n, p in zip(self._names, self._parameters, strict=True)}
        order = self._arrangement.sum_order()
        groups = [_settings_of(group) for group in self._optimizer.param_groups]
        return Settings(groups, layouts, order.packed() if order is not None else None)

    # -- between the formats ------------------------------------------------------------------------------------------

    def _whole_state(self, interval: Interval) -> State:
        parameter = self._parameters[interval.parameter]
        state = self._optimizer.state.get(parameter, {})
        return {key: cut_entry(key, value, parameter, interval) for key, value in state.items()}

    def _state_dict_of(self, states: Mapping[int, State]) -> dict[str, Any]:
        """The ``state_dict`` that plain DDP would have, with the settings of the present."""
        whole: dict[int, State] = {}
        groups: list[dict[str, Any]] = []
        position = 0
        for group, slots, names in zip(
            self._optimizer.param_groups, self._sharded.slots.groups, self._sharded.slots.names, strict=True
        ):
            packed = {
                key: names if key == "param_names" else value for key, value in group.items() if key != "params"
            }
            groups.append({**packed, "params": list(range(position, position + len(slots)))})
            for slot in slots:
                state = self._optimizer.state.get(slot, {}) if isinstance(slot, Tensor) else self._shaped(slot, states)
                if state and not _is_plain_copy(state, slot, self._parameters):
                    whole[position] = state
                position += 1
        return self._with_order({"state": whole, "param_groups": groups})

    def _with_order(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        order = self._arrangement.sum_order()
        return state_dict if order is None else order.added_to(state_dict)

    def _shaped(self, index: int, states: Mapping[int, State]) -> State:
        parameter = self._parameters[index]
        shaped = {}
        for key, value in states.get(index, {}).items():
            if isinstance(value, Tensor) and value.shape == (parameter.numel(),):
                value = shaped_like(parameter, value)
            shaped[key] = value
        return shaped

    def _cut(self, state_dict: dict[str, Any], saved_of: Mapping[int | Tensor, State | None]) -> dict[str, Any]:
        """A ``state_dict`` for the shards that the optimizer holds."""
        interval_of = {id(shard.tensor): shard.interval for shard in self._sharded.shards}
        cut: dict[int, State] = {}
        groups: list[dict[str, Any]] = []
        position = 0
        for group, saved_group in zip(self._optimizer.param_groups, state_dict["param_groups"], strict=True):
            packed = {**_settings_of(saved_group), "params": list(range(position, position + len(group["params"])))}
            if "param_names" in group:
                packed["param_names"] = group["param_names"]
            groups.append(packed)
            for tensor in group["params"]:
                interval = interval_of.get(id(tensor))
                saved = saved_of[tensor if interval is None else interval.parameter]
                if saved is not None and interval is not None:
                    parameter = self._parameters[interval.parameter]
                    saved = {key: cut_entry(key, value, parameter, interval) for key, value in saved.items()}
                if saved is not None:
                    cut[position] = saved
                position += 1
        return {**state_dict, "state": cut, "param_groups": groups}

    def _keep_for_masters(self, saved_of: Mapping[int | Tensor, State | None]) -> None:
        """Keep what is loaded before there are masters: the optimizer would round it to the parameters' type."""
        placement = self._sharded.placement(None)
        states: dict[Interval, State] = {}
        for interval in placement.intervals(self._rank):
            parameter, saved = self._parameters[interval.parameter], saved_of.get(interval.parameter)
            if saved:
                states[interval] = {key: cut_entry(key, value, parameter, interval) for key, value in saved.items()}
        self._sharded.set_states(placement, states)

    def _refuse_other_shapes(self, saved: State, index: int) -> None:
        shape = self._parameters[index].shape
        for key, value in saved.items():
            if isinstance(value, Tensor) and value.dim() > 0 and value.shape != shape:
                raise ValueError(
                    f"{key} of {self._names[index]} is saved with shape {tuple(value.shape)}, but the parameter has "
                    f"{tuple(shape)}: load a state that was saved for this model"
                )


def _is_plain_copy(state: State, slot: int | Tensor, parameters: Sequence[Tensor]) -> bool:
    """Whether there is nothing but a master that rounding has not changed: some optimizers expect all or nothing."""
    if not isinstance(slot, int) or set(state) != {MASTER_KEY}:
        return False
    master: Tensor = state[MASTER_KEY]
    return torch.equal(master, master.to(parameters[slot].dtype).to(master.dtype))


def _on_cpu(value: Any) -> Any:
    """A copy of a ``state_dict``, or of a part of one, with its tensors on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    return [_on_cpu(item) for item in value] if isinstance(value, list) else value


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a parameter group says apart from its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
