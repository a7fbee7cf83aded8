"""The DeAR benchmark: workloads that must match the paper, a clock that must not lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn

from recipes.benchmarks import dear_table2, workloads
from recipes.benchmarks.emulation import EmulatedLayer, SleepClock, emulate, gradient_values
from recipes.benchmarks.harness import Run
from recipes.benchmarks.steps import bounds_of, summarise
from recipes.benchmarks.steps_worker import StepTimes, timed_window, train_step
from recipes.benchmarks.variants import build, parse_settings, parse_variant
from recipes.common.pages import Origin

GBIT = 1e9 / 8  # bytes per second


@cache
def load(name: str) -> workloads.Workload:
    return workloads.load(name)


# Workloads


@pytest.mark.quick("resnet50-*", "bert-*")
@pytest.mark.parametrize(
    ("model", "num_layers", "num_tensors", "megabytes"),
    [("resnet50", 107, 161, 102.2), ("densenet201", 402, 604, 80.1), ("bert", 105, 206, 440.4)],
)
def test_models_match_table_1(model: str, num_layers: int, num_tensors: int, megabytes: float) -> None:
    workload = load(model)
    assert (len(workload.layers), workload.num_tensors) == (num_layers, num_tensors)
    assert workload.num_bytes / 1e6 == pytest.approx(megabytes, abs=0.05)


@pytest.mark.parametrize("model", workloads.NAMES)
def test_layer_times_make_up_the_step(model: str) -> None:
    workload = load(model)
    times = workload.layer_times_s(slow=2)
    assert sum(map(sum, times)) == pytest.approx(2 * workload.compute_s)
    assert all(backward == pytest.approx(2 * forward) and forward > 0 for forward, backward in times)


def test_bert_reads_its_word_embedding_first_and_last() -> None:
    workload = load("bert")
    word_embedding = "bert.embeddings.word_embeddings.weight"
    assert workload.layers[0].owned[0].name == word_embedding
    (decoder,) = (layer for layer in workload.layers if layer.tied)
    assert (decoder.name, decoder.tied) == ("cls.predictions.decoder", (word_embedding,))
    step = workload.step_profile(slow=1)
    assert step.tensors[0].ready_s == step.backward_s


def test_layers_come_in_execution_order() -> None:
    class Reversed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(4, 2)
            self.first = nn.Linear(8, 4, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x))

    first, last = workloads.trace(Reversed(), lambda model: model(torch.empty(1, 8)))
    assert (first.name, last.name) == ("first", "last")
    assert first.forward_flops == 2 * 8 * 4 + workloads.ELEMENTWISE_FLOPS * 4
    assert [spec.shape for spec in last.owned] == [(2, 4), (2,)]


def test_a_model_whose_parameter_never_runs_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"no leaf module ran with \['1.bias', '1.weight'\]"):
        workloads.trace(model, lambda model: model[0](torch.empty(1, 2)))  # type: ignore[index]


# Emulated compute


class FakeTime:
    """A clock on which every sleep lasts 30% longer than asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def read(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.now_s += 1.3 * duration_s


def test_sleeps_keep_to_the_schedule() -> None:
    time = FakeTime()
    clock = SleepClock(time.read, time.sleep)
    for count in range(1, 101):
        clock.sleep(0.01)
        assert time.now_s >= count * 0.01 - 1e-12
    assert time.now_s == pytest.approx(1.0, abs=0.004)


def test_time_lost_elsewhere_is_not_caught_up() -> None:
    time = FakeTime()
    clock = SleepClock(time.read, time.sleep)
    clock.sleep(0.01)
    time.now_s += 5.0  # waiting for communication
    clock.sleep(1.0)
    assert time.now_s >= 5.0 + 1.01


def test_emulated_model_has_the_real_parameters_in_execution_order() -> None:
    model = emulate(load("bert"), slow=0)
    expected = [spec.shape for layer in load("bert").layers for spec in layer.owned]
    assert [tuple(parameter.shape) for parameter in model.parameters()] == expected
    model(torch.ones(1)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("gradients", ["float32", "autocast", "bfloat16"])
def test_gradients_of_16_bits_are_those_of_casts(gradients: Any) -> None:
    workload = replace(load("bert"), gradients=gradients)
    model = emulate(workload, slow=0)
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.ones(1)).sum().backward()
    for spec, layer in zip(workload.layers, model, strict=True):
        is_linear = not any(part in spec.name for part in ("embeddings", "LayerNorm"))
        casts = gradients == "bfloat16" or (gradients == "autocast" and is_linear)
        assert isinstance(layer, EmulatedLayer)
        assert {name for name, _ in layer.reads} == {
            name for name, parameter in layer.named_parameters() if casts and parameter.dim() == 2
        }
        for parameter in layer.parameters(recurse=False):
            grad = parameter.grad
            assert grad is not None
            if parameter.numel() > 100 and not any(name.startswith("tied") for name, _ in layer.named_parameters()):
                assert torch.equal(grad, grad.bfloat16().float()) == casts, spec.name


def test_tied_gradient_comes_last() -> None:
    arrived = []
    model = emulate(load("bert"), slow=0)
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    model(torch.ones(1)).sum().backward()
    assert arrived[-1] == "0.weight"
    assert len(arrived) == load("bert").num_tensors


def test_blocks_leave_tied_layers_outside() -> None:
    workload = load("bert")
    model = emulate(workload, slow=0, block_bytes=25 * 2**20)
    blocks = [child for child in model if isinstance(child, nn.Sequential)]
    assert sum(len(block) for block in blocks) == len(workload.layers) - 2
    assert len(blocks) > 8
    large_bytes = sum(parameter.nbytes for parameter in blocks[0].parameters())
    smaller = next(child for child in emulate(workload, 0, 25 * 2**20, 2**20) if isinstance(child, nn.Sequential))
    assert 2**20 <= sum(parameter.nbytes for parameter in smaller.parameters()) < 25 * 2**20 <= large_bytes
    assert sum(parameter.numel() * 4 for parameter in model.parameters()) == workload.num_bytes


# Variants, on one rank: what they do to the weights, and how often they step


@pytest.fixture
def single_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


SGD = partial(torch.optim.SGD, lr=1.0, momentum=0.9)


def test_variants_train_alike(single_rank: None) -> None:
    def weights_after_three_steps(name: str) -> list[torch.Tensor]:
        trainee = build(parse_variant(name), load("tiny"), 0.0, SGD)
        for _ in range(3):
            train_step(trainee, StepTimes())
        trainee.finish()
        whole = [
            getattr(weight, "full_tensor", lambda weight=weight: weight)() for weight in trainee.model.parameters()
        ]
        return [weight.detach().clone() for weight in whole]

    specs = [spec for layer in load("tiny").layers for spec in layer.owned]
    gradients = gradient_values(max(spec.numel for spec in specs))
    for name in ("ddp-25mb", "ddp-bf16", "fsdp2", "dear", "topk"):
        for found, spec in zip(weights_after_three_steps(name), specs, strict=True):
            moved = (1 + 1.9 + 2.71) * gradients[: spec.numel].view(spec.shape)
            torch.testing.assert_close(0.01 - found, moved, rtol=4e-3, atol=1e-6)  # 4e-3: bf16


def test_window_holds_exactly_the_timed_steps(single_rank: None) -> None:
    trainee = build(parse_variant("ddp-25mb"), load("tiny"), 0.1, SGD)
    steps: list[None] = []
    trainee.optimizer.register_step_post_hook(lambda *_: steps.append(None))
    window = timed_window(trainee, warmup_steps=2, timed_steps=3)
    assert len(steps) == 2 + 1 + 3  # one between the barrier and the clock
    assert window.step_s >= 0.1 * load("tiny").compute_s
    assert window.step_s == pytest.approx(window.forward_s + window.backward_s + window.optimizer_s, rel=0.05)


@pytest.mark.parametrize(
    ("name", "kind", "bucket_mb"),
    [
        ("ddp-2.5mb", "ddp", 2.5),
        ("ddp-bf16", "ddp-bf16", 25),
        ("fsdp2", "fsdp2", 25),
        ("dear", "dear", 5),
        ("dear:bucket_mb=1", "dear", 1),
        ("topk:density=0.1,bucket_mb=25", "topk", 25),
    ],
)
def test_variant_names(name: str, kind: str, bucket_mb: float) -> None:
    spec = parse_variant(name)
    assert (spec.kind, spec.bucket_mb, spec.is_plain_ddp) == (kind, bucket_mb, kind == "ddp")


def test_dear_settings_of_a_variant_win_over_common_ones() -> None:
    spec = parse_variant("dear:lanes=1,fusion=layers", {"lanes": 3, "slice_mb": 4})
    assert spec.settings == {"lanes": 1, "slice_mb": 4, "fusion": "layers"}
    assert parse_variant("topk:density=0.1", {"lanes": 3}).settings == {"density": 0.1}


@pytest.mark.parametrize("name", ["ddp", "ddp-mb", "fsdp", "dears", "dear:lanes"])
def test_unknown_variant_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"variant must be|key=value"):
        parse_variant(name)


def test_settings_are_numbers_or_text() -> None:
    assert parse_settings(["lanes=3", "slice_mb=0.5", "fusion=size", "trace=True"]) == {
        "lanes": 3,
        "slice_mb": 0.5,
        "fusion": "size",
        "trace": True,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slow", "1", "2"], "one factor or one per model"),
        (["--rate", "fast"], "rate must"),
        (["--variants", "horovod"], "variant must be"),
        (["--variants", "dear", "--dear", "lane=3"], "no field lane"),
        (["--variants", "dear", "--dear", "lanes=0"], "lanes must be None, or a whole number >= 1"),
        (["--variants", "topk:slice_mb=4"], "TopKConfig has no field slice_mb"),
        (["--variants", "fsdp2-ext:buckets=4"], "ExtConfig has no field buckets"),
        (["--variants", "fsdp2:defer=False"], "no field defer"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        dear_table2.BENCHMARK.run(arguments)
    assert message in capsys.readouterr().err


# Results


def window(step_s: float) -> dict[str, float]:
    return {"step_s": step_s, "forward_s": 0.1, "backward_s": 0.2, "optimizer_s": 0.0, "cpu_s": 1.0}


def made_up_result() -> dict[str, Any]:
    windows = {
        "ddp-1mb": [window(1.3), window(1.2), window(1.6)],
        "ddp-25mb": [window(1.5)] * 3,
        "ddp-bf16": [window(0.7)] * 3,
        "dear": [window(0.9), window(1.0), window(1.1)],
    }
    return {
        **{"model": "tiny", "workers": 4, "rate": "1gbit", "slow": 1.0, "steps": 5, "rounds": 3},
        **{"num_layers": 4, "num_tensors": 8, "parameter_bytes": 1000, "compute_s": 0.3},
        **{"link_bytes_per_s": GBIT, "goodput_bytes_per_s": 0.9 * GBIT},
        "bounds": bounds_of(load("tiny"), 1, 4, GBIT) | {"dependency": 0.8},
        "bounds_goodput": bounds_of(load("tiny"), 1, 4, 0.9 * GBIT),
        "unavailable": {"fsdp2": "not today"},
        "windows": windows,
        "details": {},
    }


def test_summary_compares_with_the_best_plain_ddp() -> None:
    dear = summarise(made_up_result())["dear"]
    assert (dear.step_s, dear.fastest_s, dear.slowest_s) == (1.0, 0.9, 1.1)
    assert dear.speedup == pytest.approx(1.3)  # not over bf16's 0.7, nor a lucky 1.2
    assert dear.over_bound == pytest.approx(1.25)
    assert dear.exposed_s == pytest.approx(0.7)


def test_runs_are_saved_shown_and_rendered(tmp_path: Path) -> None:
    run = Run(Origin("python -m recipes.benchmarks.dear_table2", "today", {"torch": "2"}), [made_up_result()])
    run.save(tmp_path / "run.json")
    assert Run.load(tmp_path / "run.json") == run

    page = dear_table2.page([run])
    page.write(tmp_path / "page.md")
    assert (tmp_path / "page.png").stat().st_size > 10_000
    text = (tmp_path / "page.md").read_text()
    for expected in ("(page.png)", "| dear | 1.000 | 0.900–1.100 | 1.300 | 1.250 |", "not today", run.origin.command):
        assert expected in text

    console = Console(width=80, record=True, file=(tmp_path / "table.txt").open("w"))
    page.show(console)
    shown = console.export_text()
    assert "dependency-aware bound" in shown
    for label in dear_table2.BOUNDS.values():
        shown = shown.replace(label, "")
    assert "…" not in shown  # nothing was cut off


@pytest.mark.slow
def test_quick_run_on_loopback(tmp_path: Path) -> None:
    """Real workers, every kind of variant: exits well and writes what it promises."""
    variants = ["ddp-25mb", "ddp-bf16", "fsdp2", "dear:lanes=2"]
    dear_table2.BENCHMARK.run(["--quick", "--loopback", "--variants", *variants, "--output", str(tmp_path)])
    (result,) = Run.load(tmp_path / "dear_table2.json").results
    assert list(result["windows"]) == variants
    assert result["rate"] is None
    for measured in summarise(result).values():
        assert measured.step_s >= result["compute_s"]
        assert measured.cpu_s > 0
    # Two workers: half of every reduce-scatter and half of every gather.
    assert result["details"]["dear:lanes=2"]["sent_bytes"] == pytest.approx(result["parameter_bytes"], rel=0.1)
