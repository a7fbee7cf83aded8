"""A Llama under FSDP2, from the command line: the same with rings as without, and on from its checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.common.record import Record
from recipes.common.texts import python_documentation
from recipes.complete import llama_fsdp2
from tests.support.launcher import launch
from tests.support.recipes.launched import torchrun

TINY = [
    *["--steps=6", "--log-every=1", "--batch-size=4", "--block-length=16"],
    *["--vocab-size=600", "--hidden-size=16", "--layers=2", "--heads=2"],
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A part of the documentation, which is read faster than all of it."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(python_documentation()[:12]), encoding="utf-8")
    return f"--text={path}"


def trained(hook: str, output: Path, *arguments: str, num_ranks: int = 2, by_torchrun: bool = False) -> Record:
    given = [*TINY, "--hook", hook, "--output", str(output), *arguments]
    if by_torchrun:
        torchrun("recipes/complete/llama_fsdp2.py", *given)
    else:
        launch("recipes/complete/llama_fsdp2.py", given, num_ranks)
    (result,) = output.glob("llama_fsdp2_*.json")
    record = Record.load(result)
    result.unlink()
    assert record.hook.startswith(hook)
    assert record.num_workers == num_ranks and record.steps == 6
    return record


def losses_of(record: Record) -> list[float]:
    return [*(loss for _, loss in record.losses), record.held_out["loss"]]


@pytest.mark.slow
def test_rings_change_nothing(tmp_path: Path, text: str) -> None:
    arguments = text, "--accumulate=2", "--keep-parameters"
    ring = trained("ring", tmp_path, *arguments, by_torchrun=True)
    none = trained("none", tmp_path, *arguments)
    assert losses_of(ring) == pytest.approx(losses_of(none), rel=1e-5)
    assert ring.losses[-1][1] < ring.losses[0][1]
    assert ring.sent_mb_per_step is not None and ring.sent_mb_per_step > 0 and none.sent_mb_per_step is None


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_goes_on_where_it_stopped(tmp_path: Path, text: str) -> None:
    whole = trained("ring", tmp_path, text, "--save-every=4")
    for num_ranks in (2, 3):
        given = text, f"--resume={tmp_path}/checkpoint-4"
        resumed = trained("none", tmp_path / str(num_ranks), *given, num_ranks=num_ranks)
        assert [step for step, _ in resumed.losses] == [5, 6]
        if num_ranks == 2:
            assert losses_of(resumed) == pytest.approx(losses_of(whole)[4:], rel=1e-5)
        else:  # other batches
            assert losses_of(resumed)[-1] == pytest.approx(losses_of(whole)[-1], rel=0.05)


@pytest.mark.slow
def test_what_was_left_out_comes_back(tmp_path: Path, text: str) -> None:
    sparse = text, "--reduce-scatter=sparse", "--density=0.05", "--all-gather=bf16"
    whole = trained("ring", tmp_path, *sparse, "--save-every=4")
    assert whole.hook == "ring-gather-bf16-scatter-sparse"
    resumed = trained("ring", tmp_path, *sparse, f"--resume={tmp_path}/checkpoint-4")
    assert losses_of(resumed) == losses_of(whole)[4:]
    exact = trained("none", tmp_path, text, f"--resume={tmp_path}/checkpoint-4")
    assert losses_of(exact) == pytest.approx(losses_of(whole)[4:], rel=0.1)


@pytest.mark.slow
def test_bfloat16_in_one_process(tmp_path: Path, text: str) -> None:
    assert trained("ring", tmp_path, text, "--bf16", num_ranks=1).sent_mb_per_step is None


def test_arguments_that_cannot_work(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        llama_fsdp2.parse_arguments(["--resume=nowhere"])
    assert "found none at nowhere" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        llama_fsdp2.parse_arguments(["--hook=none", "--reduce-scatter=sparse"])
    assert "leave --hook none out" in capsys.readouterr().err
