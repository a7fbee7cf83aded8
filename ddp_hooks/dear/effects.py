"""Settings that cannot keep their promise: one table, asked where settings are written and where a state is made.

A setting that asks for what happens anyway keeps its promise, so it is no error: ``assume_elementwise=True`` with
AdamW, sums in float32 of float32 gradients, ``node_size`` on two ranks. One script can then run with any optimizer,
type of parameters and number of ranks, also with optimizers that only a later version knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch


class Setup(NamedTuple):
    """Facts that decide, beside other settings, whether a setting has an effect."""

    update: Literal["sharded", "replicated"]  # as it is done, also with update="auto"
    optimizer: str
    device: str
    dtypes: frozenset[torch.dtype]  # of parameters


class _Rule(NamedTuple):
    """Setting, condition in which it has no effect, and message, formatted with settings ``c`` and set-up ``s``."""

    name: str
    applies: Callable[..., object]
    where: str
    remedy: str = "leave it out"


_BESIDE_OTHERS = (
    _Rule(
        "gather_dtype",
        lambda c: c.rounds_to is not None,
        'with wire="{c.wire}", whose gathers move rounded differences',
    ),
    _Rule("fusion_mb", lambda c: c.fusion != "size", 'with fusion="{c.fusion}"'),
    _Rule("fusion_layers", lambda c: c.fusion != "layers", 'with fusion="{c.fusion}"'),
    _Rule(
        "node_size",
        lambda c: c.collective not in ("two-level", "auto"),
        'with collective="{c.collective}", but with "two-level" or "auto"',
    ),
    _Rule("assume_parameterwise", lambda c: c.update == "sharded", 'with update="sharded", but with "replicated"'),
    _Rule("master_dtype", lambda c: c.update == "replicated", 'with update="replicated", but with "sharded"'),
    _Rule("gather_dtype", lambda c: c.update == "replicated", 'with update="replicated", but with "sharded"'),
    _Rule(
        "gather_dtype",
        lambda c: not c.overlap_forward,
        "with overlap_forward=False, after which whole parameters may be read by pointer",
    ),
    _Rule(
        "gather_dtype",
        lambda c: c.check_replicas,
        "with check_replicas=True, which reads whole parameters after every step",
        "leave one of them out",
    ),
)
_IN_SETUP = (
    _Rule(
        "master_dtype",
        lambda _, s: s.update == "replicated",
        'with update="auto" and {s.optimizer}, whose updates are replicated',
        "leave it out, or use an element-wise optimizer",
    ),
    _Rule(
        "master_dtype",
        lambda c, s: all(dtype.itemsize > c.master_dtype.itemsize for dtype in s.dtypes),
        "with a model whose parameters are of larger types",
    ),
    _Rule(
        "wire",
        lambda c, s: c.wire == "bf16" and all(dtype.itemsize == 2 for dtype in s.dtypes) and not c.reduce_dtype,
        "with parameters in 16 bits, whose gradients travel in 16 bits",
    ),
    _Rule(
        "wire",
        lambda c, s: c.wire == "exact" and {c.reduce_dtype or dtype for dtype in s.dtypes} == {torch.float64},
        "with gradients that are summed in float64",
    ),
    _Rule(
        "gather_dtype",
        lambda _, s: s.update == "replicated",
        'with update="auto" and {s.optimizer}, whose updates are replicated',
        "leave it out, or use an element-wise optimizer",
    ),
    _Rule(
        "gather_dtype",
        lambda c, s: not s.dtypes & {torch.float32, c.gather_dtype},
        "with a model that has no parameter in float32",
    ),
    _Rule("collective", lambda c, s: s.device != "cpu" and c.collective != "auto", "on {s.device}, but on CPUs"),
    _Rule("node_size", lambda _, s: s.device != "cpu", "on {s.device}, but on CPUs"),
)


def find_setting_without_effect(config: Any, setup: Setup | None = None) -> str | None:
    """Return the first setting that has no effect, where it has none and what to do; None if all have one."""
    rules, known = (_BESIDE_OTHERS, (config,)) if setup is None else (_IN_SETUP, (config, setup))
    for name, applies, where, remedy in rules:
        value, default = getattr(config, name), getattr(type(config), name)
        if value != default and applies(*known):
            return f"{name}={value!r} has no effect " + f"{where}: {remedy}".format(c=config, s=setup)
    return None
