"""Settings that cannot work, or have no effect, are refused where they are written, in the same words everywhere.

Prevents: a wait without an end; another library's error about it in the middle of training; a run that is thought to
have a setting that nothing has looked at.
"""

from __future__ import annotations

import os
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from ddp_hooks import BucketTuner, DearConfig, QuantizedConfig, TableConfig, TopKConfig
from ddp_hooks.coordination import CoordinatorConfig
from ddp_hooks.dear.effects import Setup, find_setting_without_effect
from ddp_hooks.integrations import Tables
from fsdp_ext import ExtConfig, TuneConfig

HOOKS: list[Any] = [CoordinatorConfig, DearConfig, ExtConfig, QuantizedConfig, TableConfig, TopKConfig]
ALL: list[Any] = [*HOOKS, BucketTuner, TuneConfig]


def kinds_of(config: Any) -> dict[str, str]:
    """The annotation of every setting, by name."""
    return {each.name: str(each.type) for each in fields(config)}


WHOLE = [(config, name) for config in ALL for name, kind in kinds_of(config).items() if kind in ("int", "int | None")]
BOOLEAN = [(config, name) for config in ALL for name, kind in kinds_of(config).items() if "bool" in kind]


@pytest.mark.parametrize(("config", "name"), [*WHOLE, (TopKConfig, "teams")])
@pytest.mark.parametrize("value", [1.5, 2.0, "2", True, -1])
def test_whole_numbers_are_whole(config: Any, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be .*, got {value!r}"):
        config(**{name: value})


@pytest.mark.parametrize(("config", "name"), BOOLEAN)
@pytest.mark.parametrize("value", [1, 0, "no"])
def test_booleans_are_booleans(config: Any, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be .*True or False, got {value!r}"):
        config(**{name: value})


def test_every_kind_of_setting_is_found() -> None:
    assert (DearConfig, "lanes") in WHOLE and (TuneConfig, "max_trials") in WHOLE and len(WHOLE) > 20
    assert (ExtConfig, "error_feedback") in BOOLEAN and (TableConfig, "untie") in BOOLEAN and len(BOOLEAN) > 10


@pytest.mark.parametrize("config", HOOKS)
@pytest.mark.parametrize("timeout_s", [0, -1.0, None, "long", float("inf"), float("nan")])
def test_timeouts(config: Any, timeout_s: Any) -> None:
    with pytest.raises(ValueError) as caught:
        config(timeout_s=timeout_s)
    assert str(caught.value) == f"timeout_s must be > 0 and finite, got {timeout_s!r}"


@pytest.mark.parametrize("config", HOOKS)
@pytest.mark.parametrize("stall_warning_s", [0, -1.0, None, "long", float("nan")])
def test_warnings(config: Any, stall_warning_s: Any) -> None:
    with pytest.raises(ValueError) as caught:
        config(stall_warning_s=stall_warning_s)
    assert str(caught.value) == f"stall_warning_s must be > 0, got {stall_warning_s!r}"
    assert config(stall_warning_s=float("inf")).stall_warning_s == float("inf"), "warnings can be left out"


@pytest.mark.parametrize("config", [CoordinatorConfig, DearConfig, ExtConfig])
@pytest.mark.parametrize("slice_mb", [0, 1e-9, "small", float("inf"), float("nan")])
def test_slices(config: Any, slice_mb: Any) -> None:
    with pytest.raises(ValueError) as caught:
        config(slice_mb=slice_mb)
    assert str(caught.value) == f"slice_mb must be None, or >= 1/1024 (1 KiB) and finite, got {slice_mb!r}"
    assert config(slice_mb=1 / 1024).slice_mb == 1 / 1024


@pytest.mark.parametrize(("config", "name"), [
    (DearConfig, "fusion_mb"), (DearConfig, "atom_mb"), (TopKConfig, "group_mb"), (CoordinatorConfig, "fusion_mb"),
    (CoordinatorConfig, "credit_mb"), (CoordinatorConfig, "cycle_ms"), (ExtConfig, "pending_mb"),
    (BucketTuner, "low_mb"), (BucketTuner, "high_mb"), (BucketTuner, "start_mb"), (TuneConfig, "default_block_mb"),
])  # fmt: skip
@pytest.mark.parametrize("value", [-1, "1", True, float("inf"), float("nan")])
def test_sizes(config: Any, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be .* finite, got .*{value!r}"):
        config(**{name: value})


@pytest.mark.parametrize("config", [BucketTuner, TuneConfig])
def test_paths(config: Any) -> None:
    with pytest.raises(TypeError, match="profile must be None or a path, got 3"):
        config(profile=3)
    assert config(profile=os.devnull).profile == os.devnull


@pytest.mark.parametrize(("settings", "message"), [
    ({"ids": ["input_ids"]}, "ids must be None or a function of a batch"),
    ({"config": DearConfig()}, "config must be a TableConfig"),
    ({"follow_schedule": 1}, "follow_schedule must be True or False, got 1"),
])  # fmt: skip
def test_tables_of_other_loops(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Tables(**settings)


def test_the_largest_norm() -> None:
    for wrong in (0, -1.0, "1", True, float("nan")):
        with pytest.raises(ValueError, match=f"max_grad_norm must be > 0, got {wrong!r}"):
            DearConfig(max_grad_norm=wrong)  # type: ignore[arg-type]
    assert DearConfig(max_grad_norm=float("inf")).max_grad_norm == float("inf"), "measured, and never clipped"


# Settings beside which the last one has no effect, and those beside which it has one.
WITHOUT_EFFECT: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (DearConfig, {"fusion": "layers", "fusion_mb": 4.0}, {"fusion": "size"}),
    (DearConfig, {"fusion": "none", "fusion_mb": 4.0}, {"fusion": "size"}),
    (DearConfig, {"fusion": "size", "fusion_layers": 4}, {"fusion": "layers"}),
    (DearConfig, {"fusion": "none", "fusion_layers": 4}, {"fusion": "layers"}),
    (DearConfig, {"collective": "direct", "node_size": 2}, {"collective": "two-level"}),
    (DearConfig, {"update": "sharded", "assume_parameterwise": True}, {"update": "replicated"}),
    (DearConfig, {"update": "replicated", "master_dtype": torch.float32}, {"update": "auto"}),
    (TopKConfig, {"algorithm": "dense", "density": 0.01}, {"algorithm": "spardl"}),
    (TopKConfig, {"algorithm": "dense", "warmup_steps": 10}, {"algorithm": "auto"}),
    (TopKConfig, {"algorithm": "dense", "collection": "local"}, {"algorithm": "topka"}),
    (TopKConfig, {"algorithm": "oktopk", "teams": 2}, {"algorithm": "auto"}),
    (TopKConfig, {"teams": 1, "sag": "b"}, {"teams": 2}),
    (TopKConfig, {"warmup_steps": 0, "warmup_density": 0.25}, {"warmup_steps": 10}),
    (QuantizedConfig, {"bits": 16, "block_numel": 64}, {"bits": 8}),
    (TopKConfig, {"pipeline": "backward", "assume_parameterwise": True}, {"pipeline": "forward"}),
    (ExtConfig, {"reduce_scatter": "exact", "density": 0.01}, {"reduce_scatter": "sparse"}),
    (ExtConfig, {"reduce_scatter": "int8", "density": {"*": 0.1}}, {"reduce_scatter": "sparse"}),
    (ExtConfig, {"reduce_scatter": "bf16", "wire": "compact"}, {"reduce_scatter": "sparse"}),
    (ExtConfig, {"reduce_scatter": "bf16", "error_feedback": True}, {"reduce_scatter": "int8"}),
    (ExtConfig, {"reduce_scatter": "sparse", "error_feedback": False}, {"reduce_scatter": "int4"}),
    (ExtConfig, {"all_gather": "bf16", "block": 256}, {"all_gather": "int8"}),
    (ExtConfig, {"defer": False, "pending_mb": 10.0}, {"defer": True}),
]


@pytest.mark.parametrize(("config", "settings", "remedy"), WITHOUT_EFFECT)
def test_settings_without_effect(config: Any, settings: dict[str, Any], remedy: dict[str, Any]) -> None:
    *_, name = settings
    with pytest.raises(ValueError) as caught:
        config(**settings)
    assert str(caught.value).startswith(f"{name}={settings[name]!r} has no effect with")
    assert str(caught.value).endswith(": leave it out")
    config(**{key: value for key, value in settings.items() if key != name})
    assert getattr(config(**settings | remedy), name) == settings[name]


SHARDED = Setup("sharded", "AdamW", "cpu", frozenset([torch.float32]))
REPLICATED = SHARDED._replace(update="replicated", optimizer="Muon")
# A setting, where it has no effect, where it has one, and what a message says of the former.
IN_SETUP: list[tuple[dict[str, Any], Setup, Setup, str]] = [
    ({"master_dtype": torch.float32}, REPLICATED, SHARDED, "Muon, whose updates are replicated"),
    ({"master_dtype": torch.float32}, SHARDED._replace(dtypes=frozenset([torch.float64])), SHARDED, "larger types"),
    ({"wire": "exact"}, SHARDED._replace(dtypes=frozenset([torch.float64])), SHARDED, "summed in float64"),
    ({"collective": "two-level"}, SHARDED._replace(device="cuda"), SHARDED, "on cuda"),
    ({"collective": "auto", "node_size": 2}, SHARDED._replace(device="cuda"), SHARDED, "on cuda, but on CPUs"),
]


@pytest.mark.parametrize(("settings", "without", "remedy", "text"), IN_SETUP)
def test_settings_without_effect_here(settings: dict[str, Any], without: Setup, remedy: Setup, text: str) -> None:
    config = DearConfig(update="auto", **settings)
    *_, name = settings
    found = find_setting_without_effect(config, without)
    assert found is not None and found.startswith(f"{name}={settings[name]!r} has no effect "), found
    assert text in found and ": leave it out" in found, found
    assert find_setting_without_effect(config, remedy) is None


def test_what_is_true_anyway_is_no_error() -> None:
    """One script runs with any optimizer, type of parameters and number of ranks."""
    assumed: dict[str, Any] = {"assume_elementwise": True, "assume_parameterwise": True}
    for settings in (assumed, {"reduce_dtype": torch.float32}, {"wire": "exact"}):
        for setup in (SHARDED, REPLICATED, SHARDED._replace(dtypes=frozenset([torch.bfloat16]))):
            assert find_setting_without_effect(DearConfig(update="auto", **settings), setup) is None


@pytest.mark.parametrize("config", ALL)
def test_a_copy_of_the_defaults_is_right(config: Any) -> None:
    """What defaults stand for is found when it is asked for, so that a copy has not been given it."""
    assert replace(config()) == config()


def test_defaults() -> None:
    assert TopKConfig().density_at(0) == 0.01 and TopKConfig(algorithm="dense").density_at(0) == 1.0
    assert TopKConfig(warmup_steps=2).density_at(0) == 0.25 and TopKConfig(warmup_steps=2).density_at(2) == 0.01
    sparse, rounded = ExtConfig(reduce_scatter="sparse"), ExtConfig(reduce_scatter="int8")
    assert (sparse.density_of("any"), sparse.entries, rounded.block) == (0.01, "compact", None)
    assert rounded.keeps_residuals_of("any") and not replace(rounded, error_feedback=False).keeps_residuals_of("any")
