"""The fidelity benchmark: formats in one process are those of real ranks, runs go on, and seeds are paired.

Prevents: a table of losses that no hook would have, and differences of losses that do not belong together.
"""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import DearConfig, DearState, TopKConfig, TopKState, dear_hook, topk_hook
from recipes.benchmarks import fidelity, fidelity_formats, fidelity_training
from recipes.benchmarks.fidelity import Difference, Losses, Trial
from recipes.benchmarks.fidelity_formats import DENSE, EXACT, FORMATS, GATHERS_DIFFERENCES, Differences, Setup
from recipes.benchmarks.harness import Run, read_records
from recipes.benchmarks.variants import bf16_allreduce
from tests.support.workers import WorkerPools

STEPS = 5


def model() -> nn.Sequential:
    """A model whose backward goes from its last parameter to its first; one is too small for PowerSGD."""
    torch.manual_seed(0)
    sizes = ((48, 96), (96, 64), (64, 3))
    return nn.Sequential(*(nn.Linear(*size, bias=False) for size in sizes))


def keeps_buckets(name: str) -> bool:
    """Return True if DDP does not form other buckets after the first step; it does with the other hooks.

    What exact DeAR and SparDL sum does not depend on it. With ``find_unused_parameters=True``, which keeps buckets,
    torch's PowerSGD hangs on gloo.
    """
    return not name.startswith(("exact", "SparDL", "PowerSGD"))


def in_order_of_sum(network: nn.Module, name: str) -> list[nn.Parameter]:
    """Return the parameters in the order of the vector that is summed: of the first bucket, or of the backward."""
    parameters = list(network.parameters())
    return parameters if keeps_buckets(name) else parameters[::-1]


def train_on_ranks(rank: int, world_size: int, name: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return this rank's gradients and the weights after every step."""
    keeps = keeps_buckets(name)
    ddp = DistributedDataParallel(model(), gradient_as_bucket_view=True, find_unused_parameters=keeps)
    parameters = in_order_of_sum(ddp.module, name)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    state = hook_up(ddp, optimizer, name)
    generator = torch.Generator().manual_seed(rank)
    gradients, weights = [], []
    for _ in range(STEPS):
        inputs = torch.randn(6, 48, generator=generator)
        gradients.append(flat(torch.autograd.grad(ddp.module(inputs).square().mean(), parameters)))
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        optimizer.step()
        if isinstance(state, DearState):
            state.synchronize()
        weights.append(flat([parameter.detach() for parameter in parameters]))
    if state is not None:
        state.synchronize()
        state.close()
    return gradients, weights


def hook_up(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, name: str) -> Any:
    """Register the hook that a format is a twin of; return its state, if that must be closed."""
    if name in (EXACT, *GATHERS_DIFFERENCES):
        state = DearState(ddp, optimizer, DearConfig(wire=cast(Any, name)))
        ddp.register_comm_hook(state, dear_hook)
        return state
    if name.startswith("SparDL"):
        density = float(name.split()[1]) / 100
        sparse = TopKState(ddp, TopKConfig(density=density))
        ddp.register_comm_hook(sparse, topk_hook)
        return sparse
    if name.startswith("PowerSGD"):
        power = power_sgd.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        ddp.register_comm_hook(power, power_sgd.powerSGD_hook)
    if name.startswith("quantized"):
        package: Any = importlib.import_module("ddp_hooks.quantized")
        quantized = package.QuantizedState(ddp, package.QuantizedConfig(bits=int(name[-1])))
        ddp.register_comm_hook(quantized, package.quantized_hook)
        return quantized
    if name == "torch's bf16 hook":
        ddp.register_comm_hook(None, bf16_allreduce)
    return None


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {DENSE}))
def test_a_format_is_that_of_real_ranks(name: str, workers: WorkerPools) -> None:
    """Weights after every step are the same, bit for bit; PowerSGD's after 2 dense and 3 sparse steps."""
    if name.startswith("quantized"):
        pytest.importorskip("ddp_hooks.quantized")
    ranks = workers(4).run(train_on_ranks, name)
    parameters = [parameter.detach() for parameter in in_order_of_sum(model(), name)]
    setup = Setup([parameter.shape for parameter in parameters], 4, STEPS)
    mean_of, differences = FORMATS[name](setup), Differences(name, setup) if name in GATHERS_DIFFERENCES else None
    weights, precise = flat(parameters), flat(parameters)
    for step in range(STEPS):
        precise = precise - mean_of([gradients[step] for gradients, _ in ranks])
        if differences is None:
            weights = precise
        else:
            differences.gather(weights, precise)
        if step == 0 and name.startswith("PowerSGD"):  # a dense step, before the bucket has the order of the backward
            assert torch.allclose(weights, ranks[0][1][0], atol=1e-6)
            weights = precise = ranks[0][1][0]
        for _, found in ranks:
            assert torch.equal(found[step], weights), (step, (found[step] - weights).abs().max())


def all_reduced(rank: int, world_size: int, dtype: torch.dtype, numel: int) -> Tensor:
    values = values_of(numel, world_size)[rank].to(dtype)
    dist.all_reduce(values)
    return values


def values_of(numel: int, workers: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator) for _ in range(workers)]


@pytest.mark.parametrize("numel", [77, 10_001, 1_565_673, 2_400_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_have_the_order_of_gloo(dtype: torch.dtype, numel: int, workers: WorkerPools) -> None:
    found = workers(4).run(all_reduced, dtype, numel)[0]
    assert torch.equal(found, fidelity_formats.ring_sum([values.to(dtype) for values in values_of(numel, 4)]))


@pytest.mark.parametrize("fits", [True, False])
def test_the_exact_format_changes_no_bit(fits: bool) -> None:
    setup = Setup([torch.Size([20_011])], 4, 1)
    exact, dense = FORMATS[EXACT](setup), FORMATS[DENSE](setup)
    for step in range(3):
        gradients = [values.bfloat16().float() if fits else values for values in values_of(20_011, 4, step)]
        assert torch.equal(exact([each.clone() for each in gradients]), dense([each.clone() for each in gradients]))


@pytest.mark.parametrize(
    ("name", "step_error", "feedback"),
    [("bf16", 2**-8, 1), ("int8", 1 / 254, 1), ("quantized int8", 1 / 127, 1), ("int4", 1 / 14.99, 0.1)],
)
def test_rounding_is_small_and_is_not_lost(name: str, step_error: float, feedback: float) -> None:
    """One mean is as near as its rounding, and means of many steps are nearer: error feedback."""
    setup, gradients = Setup([torch.Size([10_000])], 4, 1), values_of(10_000, 4)
    mean_of, expected = FORMATS[name](setup), torch.stack(gradients).mean(0)
    means = [mean_of([each.clone() for each in gradients]) for _ in range(16)]
    bound = step_error * max(float(each.abs().max()) for each in gradients)
    errors = [float((mean - expected).abs().max()) for mean in (means[0], torch.stack(means).mean(0))]
    assert 0 < errors[0] <= bound and errors[1] <= 2 * bound / feedback / 16


def test_a_codec_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a codec of .*got 'int3'"):
        fidelity_formats.codec_called("int3")


def test_running_statistics_are_those_of_the_first_worker() -> None:
    task = fidelity_training.TASKS["tiny"]
    batches = [next(fidelity_training.draw(task, seed)) for seed in range(3)]
    torch.manual_seed(0)
    together, alone = (fidelity_training.make_model(task) for _ in range(2))
    alone.load_state_dict(together.state_dict())
    _, gradients = fidelity_training.gradients_of(together, list(together.parameters()), batches, autocast=False)
    for batch, gradient in zip(batches, gradients, strict=True):
        loss = alone(*batch)
        assert torch.equal(flat(torch.autograd.grad(loss, list(alone.parameters()))), gradient)
        if batch is batches[0]:
            expected = [buffer.clone() for buffer in alone.buffers()]
    assert all(map(torch.equal, together.buffers(), expected))


def test_seeds_are_compared_with_themselves() -> None:
    def record(name: str, seed: int, loss: float) -> dict[str, Any]:
        return {"task": "LSTM", "format": name, "seed": seed, "loss": loss}

    dense = [record(DENSE, seed, loss) for seed, loss in enumerate([4.0, 5.0, 8.0])]
    losses = Losses([record("int8", 1, 5.1), *dense, record("int8", 0, 4.04), record("bf16", 2, 8.0)])
    assert losses.against_dense("LSTM", "int8") == pytest.approx(Difference(1.5, 0.5))
    only, missing = losses.against_dense("LSTM", "bf16"), losses.against_dense("LSTM", "exact")
    assert only is not None and only.mean == 0 and math.isnan(only.error) and missing is None
    assert only.text(3, "+") == "+0.000" and Difference(1.5, 0.5).text(2) == "1.50 ± 0.50"


def test_a_run_goes_on_where_it_was_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[Trial] = []

    def train(trial: Trial) -> dict[str, Any]:
        trained.append(trial)
        return {**vars(trial), "loss": 1.0, "differs_at": None, "settings": repr(fidelity_training.TASKS["tiny"]),
                "date": "2026-01-01 00:00 UTC", "seconds": 1.0, "training_losses": []}

    monkeypatch.setattr(fidelity_training, "train", train)
    command = ["--quick", "--output", str(tmp_path), "--formats", DENSE]
    fidelity.BENCHMARK.run(command)
    assert [(trial.format, trial.seed) for trial in trained] == [
        (DENSE, 0), (EXACT, 0), ("int8", 0), ("SparDL, 1 %", 0), (DENSE, 1), ("int8", 1), ("SparDL, 1 %", 1)
    ]
    path = tmp_path / "records.jsonl"
    lines = path.read_text().splitlines()
    other = json.dumps(json.loads(lines[2]) | {"settings": "of another model"})
    path.write_text("\n".join([*lines[:2], other, lines[3][:50]]))  # ended while it wrote the fourth line
    trained.clear()
    fidelity.BENCHMARK.run(command)
    assert [(trial.format, trial.seed) for trial in trained] == [
        ("int8", 0), ("SparDL, 1 %", 0), (DENSE, 1), ("int8", 1), ("SparDL, 1 %", 1)
    ]
    assert len(read_records(path)) == 8 and len(Run.load(tmp_path / "fidelity.json").results) == 7


def test_quick_run_makes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    fidelity.BENCHMARK.run(["--quick", "--output", str(tmp_path), "--markdown", str(page)])
    records = {(each["format"], each["seed"]): each for each in Run.load(tmp_path / "fidelity.json").results}
    assert len(records) == 7 and records[EXACT, 0]["differs_at"] is None
    assert records["int8", 0]["training_losses"][0] == records[DENSE, 0]["training_losses"][0]  # the same batches
    assert 0 < abs(records["int8", 0]["loss"] - records[DENSE, 0]["loss"]) < 0.02
    assert "| exact | identical |" in page.read_text() and (tmp_path / "page.png").stat().st_size > 5_000
    assert "SparDL, 1 %" in capsys.readouterr().out


@pytest.mark.slow
def test_every_format_trains_in_processes_of_its_own(tmp_path: Path) -> None:
    command = ["--tasks", "tiny", "--seeds", "1", "--steps", "25", "--jobs", "2"]
    fidelity.BENCHMARK.run([*command, "--output", str(tmp_path)])
    records = Run.load(tmp_path / "fidelity.json").results
    assert {record["format"] for record in records} == FORMATS.keys()
    assert all(record["training_losses"][-1] < record["training_losses"][0] for record in records)


@pytest.mark.slow
@pytest.mark.parametrize("task", fidelity.TASKS)
def test_every_task_learns(task: str) -> None:
    record = fidelity_training.train(Trial(task, EXACT, 0, 80, 2))
    assert record["differs_at"] is None and math.isfinite(record["loss"])
    losses = record["training_losses"]
    assert sum(losses[-10:]) < sum(losses[:10])  # of so few images, one step's loss is a matter of chance
