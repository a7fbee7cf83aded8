"""Recipes of one feature: each trains on real ranks, and its feature does what only it can break."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

from recipes.common.texts import python_documentation
from tests.support.launcher import launch
from tests.support.recipes.launched import ROOT, torchrun

ON_BYTES = ["--batch-size=4", "--block-length=64", "--log-every=1"]
# Arguments that make each recipe short, and words that its output has.
RECIPES: dict[str, tuple[list[str], str]] = {
    "minimal_ddp": ([], "epoch 5"),
    "sparse_ddp": (
        ["--steps=12", "--batch-size=16", "--log-every=1", "--density=0.02", "--warmup-steps=4"],
        r"the last step sent 0\.\d+ MB, of gradients of 36\.\d MB",
    ),
    "tables_ddp": (
        ["--steps=8", "--batch-size=4", "--width=32", "--log-every=1"],
        r"sent gradients of \d+ rows of [\d,]+\n[1-9]\d* of them before the next lookup, [1-9]\d* after it",
    ),
    "fsdp2": (["--steps=6", *ON_BYTES, "--all-gather=bf16", "--reduce-scatter=int8"], r"sent [1-9]\d*\.\d MB in all"),
    "coordinated": (["--steps=30", "--batch-size=16", "--width=16", "--accumulate=2", "--num-groups=3"], "MB per step"),
    "checkpoint_resume": (["--steps=20"], "step    20"),
    "with_trainer": (["--steps=6", *ON_BYTES], "ddp_hooks/stall_s.*\n(.*\n)*loss on held-out text"),
    "with_accelerate": (["--steps=6", "--accumulate=2", *ON_BYTES], "step     6"),
    "with_lightning": (["--epochs=2", *ON_BYTES, "--layers=1", "--width=32"], "validation loss"),
}
BY_TORCHRUN = {"minimal_ddp", "with_accelerate", "with_lightning", "fsdp2"}  # as users start them
SLOW = {"with_accelerate", "minimal_ddp", "sparse_ddp", "fsdp2", "with_lightning", "with_trainer"}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the argument for a part of the documentation, which is read faster than all of it."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(python_documentation()[:3]), encoding="utf-8")
    return f"--text={path}"


def losses_of(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"(?<!_)loss'?:? '?(\d+\.\d+)", output)]


def arguments_of(recipe: str, text: str, output: Path) -> list[str]:
    source = (ROOT / "recipes" / f"{recipe}.py").read_text()
    given = [*RECIPES[recipe][0]]
    given += [text] if "add_text_arguments" in source else []
    return given + ([f"--output={output}"] if "--output" in source else [])


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in RECIPES]
)
def test_recipe_learns_with_its_feature(recipe: str, text: str, tmp_path: Path) -> None:
    script, given = f"recipes/{recipe}.py", arguments_of(recipe, text, tmp_path)
    output = torchrun(script, *given) if recipe in BY_TORCHRUN else launch(script, given)
    losses = losses_of(output)
    third = len(losses) // 3 or 1
    assert len(losses) >= 2 and mean(losses[-third:]) < mean(losses[:third])
    assert re.search(RECIPES[recipe][1], output), output


def test_every_recipe_is_short_and_in_the_tables() -> None:
    files = {path.stem: path.read_text() for path in (ROOT / "recipes").glob("[!_]*.py")}
    assert files.keys() == RECIPES.keys()
    assert {name: len(text.splitlines()) for name, text in files.items() if len(text.splitlines()) > 120} == {}
    page = (ROOT / "recipes" / "README.md").read_text()
    assert [name for name in files if f"[{name}.py](../recipes/{name}.py)" not in page] == []
    imported = {module for text in files.values() for module in re.findall(r"^from (recipes\.\w+)", text, re.MULTILINE)}
    assert imported == {"recipes.common"}


# Checkpoints --------------------------------------------------------------------------------------------


def saved(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(folder / "full.pt", weights_only=True)
    return content


def assert_close(found: Any, expected: Any, rtol: float, atol: float) -> None:
    for part in ("model", "optimizer"):
        torch.testing.assert_close(found[part], expected[part], rtol=rtol, atol=atol)


@pytest.mark.parametrize("form", ["full", pytest.param("sharded", marks=pytest.mark.slow)])
def test_resumed_run_ends_with_the_same_bits(form: str, tmp_path: Path) -> None:
    def run(output: str, *more: str, ranks: int = 2) -> dict[str, Any]:
        given = ["--steps=8", "--batch-size=12", f"--output={tmp_path / output}", "--save-every=4", *more]
        launch("recipes/checkpoint_resume.py", given, ranks)
        return saved(tmp_path / output / "step-8") if "--format=sharded" not in more else {}

    whole = run("whole")
    folder = tmp_path / "whole" / "step-4"
    if form == "sharded":
        run("sharded", "--format=sharded")
        folder = tmp_path / "sharded" / "step-4"
        assert len(list(folder.glob("__*_0.distcp"))) == 2, "every rank has written its part"
    assert_close(run("again", f"--resume={folder}"), whole, rtol=0, atol=0)
    assert_close(run("three ranks", f"--resume={folder}", ranks=3), whole, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "arguments", "resume"),
    [
        ("with_trainer", ["--steps=6", "--save-every=4"], "--resume"),
        ("with_accelerate", ["--steps=6", "--save-every=4", "--accumulate=2"], "--resume={}/checkpoint-4"),
        ("with_lightning", ["--layers=1", "--width=32"], "--resume"),
        ("fsdp2", ["--steps=6", "--save-every=4", "--reduce-scatter=sparse"], "--resume={}/step-4"),
    ],
)
def test_recipe_goes_on_where_it_stopped(
    recipe: str, arguments: list[str], resume: str, text: str, tmp_path: Path
) -> None:
    def run(*more: str) -> list[float]:
        return losses_of(launch(f"recipes/{recipe}.py", [*ON_BYTES, *arguments, text, f"--output={tmp_path}", *more]))

    if recipe == "with_lightning":
        run("--epochs=1")
        resumed = run("--epochs=2", resume)
        (tmp_path / "last.ckpt").unlink()
        whole = run("--epochs=2")
    else:
        whole = run()
        if recipe == "with_trainer":
            (tmp_path / "checkpoint-6").rename(tmp_path / "of_the_whole_run")
        resumed = run(resume.format(tmp_path))
    assert 0 < len(resumed) < len(whole)
    assert resumed == whole[-len(resumed) :]
