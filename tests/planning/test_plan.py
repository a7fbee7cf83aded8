"""Plans: what is recommended and why, scripts that run unchanged, and the command line with its errors."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_hooks
from ddp_hooks import DearConfig, DearState, QuantizedConfig, TopKConfig, dear_hook
from ddp_hooks.comm import AlphaBeta
from ddp_hooks.planner import Plan, plan, predict, strategies
from ddp_hooks.planning import (
    Costs,
    Ddp,
    Dear,
    LinkFit,
    Network,
    Prediction,
    Quantized,
    SparDL,
    Strategy,
    link_of,
)
from ddp_hooks.planning import command as command_line
from ddp_hooks.planning.measurement.scripts import profile_script
from recipes.benchmarks.workloads import profile_of_layers
from tests.support.workers import WorkerPools

STEP = profile_of_layers(
    [(0.01, 0.02, [i]) for i in range(10)], [f"layer {i}" for i in range(10)], [4_000_000] * 10, optimizer_s=0.001
)

SCRIPT = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
assert __name__ == "__main__"
width = int(sys.argv[1])
teacher = nn.Linear(8, 4).requires_grad_(False)
model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))
optimizer = torch.optim.AdamW(model.parameters())
model.eval()(torch.randn(2, 8))  # an evaluation first
model.train()
for step in range(int(sys.argv[2])):
    optimizer.zero_grad()
    for _ in range(2):  # accumulation
        x = torch.randn(16, 8)
        try:
            (model(x) - teacher(x)).pow(2).mean().backward()
        except Exception:
            raise SystemExit("nothing may be caught here")
    try:
        optimizer.step()
    except Exception:
        raise SystemExit("the end of the plan must not be caught")
print("the script has ended")
"""

TWO_MODELS = """
import torch
first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
while True:
    try:
        second(first(torch.ones(1, 4))).sum().backward()
        optimizer.step()
    except Exception:
        pass
"""


# -- what is recommended -----------------------------------------------------------------------------------------------


def plan_for(gbit_s: float) -> Plan:
    return predict(STEP, Network(4, link_of(gbit_s)), Costs())


def test_fast_networks_need_nothing() -> None:
    found = plan_for(1000.0)
    assert found.recommended is found.present
    assert found.limit.startswith("computing")


def prediction(strategy: str, step_s: float, exposed_s: float) -> Prediction:
    is_exact = not strategy.endswith(("int8", "0.01"))
    return Prediction(strategy, step_s, exposed_s, 1e6, 0.0, (), (), is_exact=is_exact)


def plan_of(steps_s: dict[str, float], error: float | None = None) -> Plan:
    """A plan in which each strategy takes so long; a step computes for 0.3 s."""
    predictions = tuple(prediction(name, step_s, step_s - 0.3) for name, step_s in steps_s.items())
    fit = None if error is None else LinkFit(AlphaBeta(1e-4, 1e-8), 0.0, 0.0, error, {})
    return Plan(STEP, Network(4, link_of(1.0)), Costs(), fit, predictions)


@pytest.mark.parametrize(("steps_s", "recommended"), [
    ({"DDP": 0.50, "DDP, 5 MB": 0.50, "DeAR, sharded": 0.49, "DeAR, replicated": 0.49}, "DDP"),
    ({"DDP": 0.50, "DDP, 5 MB": 0.41, "DeAR, sharded": 0.40, "DeAR, replicated": 0.40}, "DDP, 5 MB"),
    ({"DDP": 0.50, "DDP, 5 MB": 0.45, "DeAR, sharded": 0.41, "DeAR, replicated": 0.40}, "DeAR, sharded"),
    ({"DDP": 0.50, "DDP, 5 MB": 0.45, "DeAR, sharded": 0.44, "DeAR, replicated": 0.40}, "DeAR, replicated"),
    ({"DDP": 0.50, "DeAR, sharded": 0.41, "SparDL, 0.01": 0.35}, "DeAR, sharded"),
    ({"DDP": 0.50, "DeAR, sharded": 0.41, "SparDL, 0.01": 0.30}, "SparDL, 0.01"),
    ({"DDP": 0.50, "DeAR, sharded": 0.41, "DeAR, int8": 0.33, "SparDL, 0.01": 0.30}, "DeAR, int8"),
    ({"DDP": 0.50, "DeAR, sharded": 0.41, "DeAR, int8": 0.35, "SparDL, 0.01": 0.30}, "SparDL, 0.01"),
    ({"DDP": 0.50, "DeAR, sharded": 0.48, "DeAR, int8": 0.38, "Quantized, int8": 0.33, "SparDL, 0.01": 0.32},
     "DeAR, int8"),
    ({"DDP": 0.60, "DeAR, sharded": 0.56, "DeAR, int8": 0.44, "SparDL, 0.01": 0.35}, "SparDL, 0.01"),
    ({"DDP": 0.31, "DeAR, sharded": 0.29}, "DDP"),  # computing limits: 5 % is the optimizer, say
])  # fmt: skip
def test_the_simplest_within_the_noise(steps_s: dict[str, float], recommended: str) -> None:
    assert plan_of(steps_s).recommended.strategy == recommended


def test_nothing_is_recommended_where_computing_limits(capsys: pytest.CaptureFixture[str]) -> None:
    command_line.show(plan_of({"DDP": 0.31, "DeAR, sharded": 0.25}))
    printed = capsys.readouterr().out
    assert "What limits DDP: computing: communication is hidden" in printed and "Stay with plain DDP" in printed
    command_line.show(plan_of({"DDP": 0.50, "DeAR, sharded": 0.31}))
    printed = capsys.readouterr().out
    assert "What limits DDP: dependencies" in printed and "What limits it then: computing" in printed


def test_nothing_is_recommended_on_a_noisy_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    times_s = {"DDP": 0.50, "DeAR, sharded": 0.35}
    assert plan_of(times_s, error=0.3).recommended.strategy == "DeAR, sharded"
    noisy = plan_of(times_s, error=1.09)
    assert noisy.recommended is noisy.present
    command_line.show(noisy)
    printed = capsys.readouterr().out
    assert "Nothing is recommended: the measurement of the network is too noisy: it is off by 109%" in printed
    assert "*" not in printed and "Stay with plain DDP" not in printed


def test_lossy_strategies_say_what_they_do(capsys: pytest.CaptureFixture[str]) -> None:
    said = {
        "DeAR, int8": "It rounds gradients and changes of parameters to int8, ",
        "Quantized, int8": "It rounds gradients and their means to 8 bits, ",
        "SparDL, 0.01": "It leaves gradients for later steps: check that your model learns as well (docs/sparse.md).",
    }
    found = plan_for(0.1)
    for lossy in (Dear(wire="int8"), Quantized(), SparDL()):
        shown = predict(STEP, found.network, Costs(), compared=(Ddp(), Dear(), lossy))
        assert shown.recommended.strategy == lossy.name and not shown.recommended.is_exact
        command_line.show(shown)
        printed = capsys.readouterr().out
        assert said[lossy.name] in printed
        assert ("docs/fewer_bytes.md" in printed) == ("int8" in lossy.name)
        assert ('DearConfig(wire="int8", tuner=' in printed) == (lossy == Dear(wire="int8"))
    command_line.show(predict(STEP, found.network, Costs(), compared=(Ddp(), Dear())))
    assert "check that your model learns" not in capsys.readouterr().out


def test_gathers_in_16_bits_where_autocast_reads() -> None:
    casts = replace(STEP, tensors=(replace(STEP.tensors[0], exact_width=0.5, is_cast=True), *STEP.tensors[1:]))
    names = [each.name for each in strategies(profile=casts)]
    assert len(names) == 8 and names[3] == "DeAR, 16-bit gathers"
    assert [each.name for each in strategies(profile=STEP)] == [each for each in names if "16-bit" not in each]
    predictions = predict(casts, Network(2, link_of(1.0)), Costs()).predictions
    assert [each.strategy for each in predictions] == names
    assert [each.is_exact for each in predictions] == [True] * 5 + [False] * 3


OURS: dict[Strategy, object] = {
    Dear(gather_dtype=torch.bfloat16): DearConfig(gather_dtype=torch.bfloat16),
    Dear("replicated"): DearConfig(update="replicated"),
    Dear(wire="int8"): DearConfig(wire="int8"),
    Quantized(): QuantizedConfig(bits=8),
    SparDL(): TopKConfig(density=0.01),
}


@pytest.mark.parametrize(("strategy", "expected"), OURS.items(), ids=lambda each: getattr(each, "name", ""))
def test_lines_have_real_settings(strategy: Strategy, expected: object) -> None:
    calls = [node for node in ast.walk(ast.parse(strategy.line)) if isinstance(node, ast.Call)]
    made = {node.func.id: node for node in calls if isinstance(node.func, ast.Name)}
    (config,) = (ast.unparse(node) for name, node in made.items() if name.endswith("Config"))
    assert eval(config, {**vars(ddp_hooks), "torch": torch}) == expected
    (state,) = (getattr(ddp_hooks, name) for name in made if name.endswith("State"))
    methods = [node.func.attr for node in calls if isinstance(node.func, ast.Attribute)]
    assert methods[0] == "register_comm_hook" and all(hasattr(state, name) for name in methods[1:])


def run_lines(rank: int, world_size: int) -> list[object]:
    """Train with the lines of every strategy; return their settings."""
    found = []
    for strategy in OURS:
        model = nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        names = {**vars(ddp_hooks), **globals(), "model": model, "optimizer": optimizer, "max_norm": 1.0}
        set_up, later = strategy.line.split("_hook)\n")
        exec(set_up + "_hook)", names)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = names["ddp"](torch.ones(4, 64)).sum()
            loss.backward()
            if "clip" in later:
                exec(later.splitlines()[0], names)
            optimizer.step()
            optimizer.zero_grad()
        exec("\n".join(line for line in later.splitlines() if "clip" not in line), names)
        found.append(names["state"].config)
        names["state"].close()
    return found


@pytest.mark.slow
def test_lines_can_be_run(workers: WorkerPools) -> None:
    for configs in workers(2).run(run_lines):
        assert configs == list(OURS.values())


def test_lines_for_clipping_and_saving() -> None:
    assert "state.clip_grad_norm_(max_norm)" in Dear().line and "state.consolidate()" in Dear().line
    assert "state.clip_grad_norm_" in Dear("replicated").line and "consolidate" not in Dear("replicated").line
    assert "state.state_dict()" in SparDL().line


def test_dear_where_communication_shows() -> None:
    found = plan_for(2.5)
    assert found.recommended.strategy == "DeAR, sharded"
    assert "DearState" in found.recommended_line
    assert found.recommended.step_s < found.present.step_s


def test_spardl_where_the_link_is_slow() -> None:
    found = plan_for(0.1)
    assert found.recommended.strategy == "SparDL, 0.01"
    exact = predict(STEP, Network(4, link_of(0.1)), Costs(select_s_per_byte=1.0))
    assert not exact.recommended.strategy.startswith("SparDL"), "finding the largest takes too long"
    assert exact.limit.startswith("the link, which is busy for 9")


def test_plans_are_files(tmp_path: Path) -> None:
    found = plan_for(2.5)
    found.save(tmp_path / "plan.json")
    found.draw(tmp_path / "plan.png")
    found.write_trace(tmp_path / "trace.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["recommended"] == "DeAR, sharded" and len(data["predictions"]) == 7
    assert [each["is_exact"] for each in data["predictions"]] == [True] * 4 + [False] * 3
    assert data["doubt"] is None and data["predictions"][1]["strategy"] == "DDP, 5 MB"
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    titles = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert titles[2].startswith("DeAR, sharded: ") and titles[2].endswith("(simulated)")


# -- in a program ------------------------------------------------------------------------------------------------------


def plan_here(rank: int, world_size: int) -> tuple[list[float], str, bool, str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    ddp = DistributedDataParallel(model) if world_size > 1 else model
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def step() -> None:
        optimizer.zero_grad()
        ddp(torch.randn(4, 64)).sum().backward()
        optimizer.step()

    try:
        found = plan(ddp, step)
    except ValueError as error:
        return [], "", False, str(error)
    described = plan(ddp, step, Network(64, link_of(10.0, 50e-6)))
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    step()
    assert described.network.workers == 64 and described.fit is None
    return [each.step_s for each in found.predictions], str(found.fit), same, ""


@pytest.mark.slow
def test_ranks_have_the_same_plan(workers: WorkerPools) -> None:
    outcomes = workers(2).run(plan_here)
    assert outcomes[0] == outcomes[1]
    predicted, fit, same, _ = outcomes[0]
    assert len(predicted) == 7 and min(predicted) > 0 and same
    assert "microseconds per message" in fit


def test_one_process_describes_its_network(workers: WorkerPools) -> None:
    (outcome,) = workers(1).run(plan_here)
    assert "start several (torchrun), or describe the network" in outcome[3]


def plan_that_fails(rank: int, world_size: int) -> str:
    model = nn.Linear(8, 8)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

    def step() -> None:
        if rank == 1:
            raise IndexError("no more batches")
        ddp(torch.ones(1, 8)).sum().backward()
        optimizer.step()

    try:
        plan(ddp, step)
    except ValueError as error:
        return str(error)
    return ""


def test_an_error_of_one_rank_is_everyones(workers: WorkerPools) -> None:
    for message in workers(2).run(plan_that_fails):
        place = " (see docs/troubleshooting.md#set-up-is-refused)"
        assert message == f"on ranks [1]: IndexError: no more batches{place}"


def plan_with_hook(rank: int, world_size: int) -> str:
    ddp = DistributedDataParallel(nn.Linear(8, 8), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    state = DearState(ddp, optimizer)
    ddp.register_comm_hook(state, dear_hook)
    try:
        plan(ddp, lambda: None, Network(4, link_of(1.0)))
    except ValueError as error:
        return str(error)
    finally:
        state.close()
    return ""


def test_models_with_hooks_are_refused(workers: WorkerPools) -> None:
    for message in workers(2).run(plan_with_hook):
        assert "plan with plain DistributedDataParallel, before register_comm_hook()" in message


# -- scripts -----------------------------------------------------------------------------------------------------------


def run(*arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ddp_hooks", "plan", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_a_script_runs_unchanged_and_is_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    argv, path = list(sys.argv), list(sys.path)
    profile, model = profile_script(script, ["32", "1000"], 3, 2)
    assert [tensor.name for tensor in profile.tensors] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert profile.num_bytes == 4 * (8 * 32 + 32 + 32 * 4 + 4)
    assert profile.optimizer_s > 0 and profile.other_s > 0
    assert "the script has ended" not in capsys.readouterr().out
    assert (sys.argv, sys.path) == (argv, path)
    assert not nn.modules.module._global_forward_pre_hooks


def test_a_script_that_ends_too_soon(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with pytest.raises(ValueError, match=r"took 3 optimizer steps, and 5 are needed \(--warmup, --steps\): it ended"):
        profile_script(script, ["32", "3"], 3, 2)


def test_options_of_the_script_are_the_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; print(sys.argv[1:])")
    with pytest.raises(SystemExit, match="took 0 optimizer steps"):
        command_line.main(["plan", "--steps", "1", str(script), "--steps", "7", "--lr=0.1", "x"])
    assert "['--steps', '7', '--lr=0.1', 'x']" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys; sys.exit(3)", "took 0 optimizer steps, and 5 are needed .*: it called exit.3."),
        ("x = 1 / 0", "it failed: ZeroDivisionError: division by zero"),
        ("print(1)", "it ended"),
        (TWO_MODELS, "no single module that was called in training mode holds all parameters of the optimizers"),
    ],
)
def test_scripts_that_do_not_train(tmp_path: Path, text: str, message: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    with pytest.raises(ValueError, match=message):
        profile_script(script, [], 3, 2)


@pytest.mark.slow
def test_described_networks_need_one_process(tmp_path: Path) -> None:
    script, saved = tmp_path / "train.py", tmp_path / "plan.json"
    script.write_text(SCRIPT)
    done = run("--workers", "64", "--rate", "10gbit", "--save", str(saved), str(script), "64", "1000")
    assert done.returncode == 0, done.stderr
    assert "Predicted seconds per step, 64 workers" in done.stdout and "(described)" in done.stdout
    assert json.loads(saved.read_text())["network"]["workers"] == 64


@pytest.mark.slow
def test_torchrun_measures(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        SCRIPT.replace("from torch import nn\n", "from torch import nn\ntorch.distributed.init_process_group('gloo')\n")
        .replace("optimizer = ", "model = nn.parallel.DistributedDataParallel(model)\noptimizer = ")
    )
    launch = "-m torch.distributed.run --nproc-per-node 2 -m ddp_hooks plan"
    done = subprocess.run(
        [sys.executable, *launch.split(), str(script), "64", "99"],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Predicted seconds per step, 2 workers") == 1
    assert "microseconds per message" in done.stdout


# -- models, and wrong commands ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_models_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    network = ["--workers", "8", "--rate", "1gbit", "--node-size", "4"]
    command_line.main(["plan", "--model", "resnet18", "--batch", "1", "--steps", "1", *network])
    printed = capsys.readouterr().out
    assert "46.8 MB of gradients in 62 tensors" in printed and "DeAR, sharded" in printed
    assert "SparDL is not among them" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a training script, or --model NAME"),
        (["--model", "resnet18", "train.py"], "give a training script, or --model NAME"),
        (["--workers", "8", "train.py"], "a described network has --workers and --rate"),
        (["--workers", "8", "--rate", "fast", "train.py"], "--rate must look like 500mbit or 10gbit, got 'fast'"),
        (["--workers", "8", "--rate", "1gbit", "--latency", "5", "t.py"], "--latency must look like 50us or 1ms"),
        (["--workers", "8", "--rate", "1gbit", "--node-size", "3", "t.py"], "node_size must divide 8 workers, got 3"),
        (["--steps", "0", "train.py"], "--steps must be >= 1, got 0"),
        (["--save", "/no/such/folder/plan.json", "train.py"], "there is no folder /no/such/folder for plan.json"),
        (["--draw", "plan.txt", "train.py"], "--draw takes a .png, .svg or .pdf, got plan.txt"),
    ],
)
def test_wrong_commands(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line.main(["plan", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py"], "error: there is no script missing.py"),
        (["--model", "resnet5000", "--workers", "2", "--rate", "1gbit"], "there is no model 'resnet5000'"),
        pytest.param(
            ["--model", "BertModel", "--workers", "2", "--rate", "1gbit"],
            "BertModel cannot be trained on noise",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_does_not_exist(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        command_line.main(["plan", *arguments])
    assert not dist.is_initialized()


def test_a_plan_makes_a_tuner() -> None:
    found = predict(STEP, Network(4, link_of(1.0, 1e-4)), Costs())
    sharded = found.tuner(max_trials=7)
    assert sharded.max_trials == 7 and 1.0 <= sharded.start_mb <= 100.0
    assert found.tuner(low_mb=30.0).start_mb >= 30.0, "the default start of 25 MB is outside"
    assert found.tuner(high_mb=20.0).start_mb <= 20.0
    assert found.tuner("replicated").start_mb > 0
    with pytest.raises(TypeError, match="tuner\\(\\) finds start_mb itself"):
        found.tuner(start_mb=3.0)


def test_the_line_of_a_tuner_is_of_what_is_recommended(capsys: pytest.CaptureFixture[str]) -> None:
    network = Network(4, link_of(1.0, 1e-4))
    for update, shown in (("replicated", 'DearConfig(update="replicated", tuner='), ("sharded", "DearConfig(tuner=")):
        found = predict(STEP, network, Costs(), compared=(Ddp(), Dear(update)))  # type: ignore[arg-type]
        assert found.recommended_update == update
        command_line.show(found)
        assert shown in capsys.readouterr().out
