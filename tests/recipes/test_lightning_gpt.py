"""The Lightning recipe: equal losses with plain DDP and DeAR, and runs that go on where they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recipes.common.texts import python_documentation
from recipes.complete import lightning_gpt as recipe
from tests.support.recipes.launched import run_recipe

TINY = [
    *["--epochs=2", "--batch-size=4", "--accumulate=2", "--clip=0.5", "--log-every=1"],
    *["--layers=2", "--width=32", "--heads=2", "--block-length=32"],
]
STEPS = 11  # per epoch: 169 blocks, 21 batches of each of two ranks


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("".join(python_documentation())[:6000], encoding="utf-8")
    return f"--text={path}"


@pytest.mark.slow
def test_dear_has_the_losses_of_plain_ddp_and_resumes(tmp_path: Path, text: str) -> None:
    plain = run_recipe("lightning_gpt", tmp_path / "none", "none", *TINY, text)
    assert plain.num_workers == 2 and plain.steps == 2 * STEPS == len(plain.losses)
    assert plain.losses[-1][1] < plain.losses[0][1] < 6  # log(256) = 5.5 is what guessing a byte costs

    half = run_recipe("lightning_gpt", tmp_path / "dear", "dear", *TINY, text, "--stop-after=1", by_torchrun=True)
    assert half.num_workers == 2 and half.steps == STEPS
    assert half.sent_mb_per_step is not None and half.sent_mb_per_step > 0
    assert half.stall_s_per_step is not None

    resumed = run_recipe("lightning_gpt", tmp_path / "dear", "dear", *TINY, text, "--resume")
    assert resumed.num_workers == 2
    assert [step for step, _ in resumed.losses] == [step for step, _ in plain.losses]
    assert [loss for _, loss in resumed.losses] == pytest.approx([loss for _, loss in plain.losses], abs=1e-4)
    assert resumed.held_out["nats per byte"] == pytest.approx(plain.held_out["nats per byte"], abs=1e-4)
    assert (tmp_path / "dear" / "best.ckpt").exists()
    assert "ddp_hooks/stall_s" in (tmp_path / "dear" / "metrics.csv").read_text().splitlines()[0]


def test_sparse_gradients(tmp_path: Path, text: str) -> None:
    record = run_recipe("lightning_gpt", tmp_path, "topk", *TINY, text, "--epochs=1")
    assert record.num_workers == 2 and record.steps == STEPS
    assert record.sent_mb_per_step is not None and 0 < record.sent_mb_per_step < 0.05  # plain DDP sends 0.14
    assert (tmp_path / "last.ckpt.ddp_hooks").is_dir()


def test_one_process_needs_no_launcher(tmp_path: Path, text: str) -> None:
    record = run_recipe("lightning_gpt", tmp_path, "dear", *TINY, text, "--epochs=1", ranks=0)
    assert record.num_workers == 1 and record.sent_mb_per_step is None


# Model and text ----------------------------------------------------------------------------------------


def test_a_byte_does_not_see_those_after_it() -> None:
    torch.manual_seed(0)
    gpt = recipe.Gpt(2, 32, 4, 16)
    ids = torch.randint(0, 256, (2, 16))
    other = ids.clone()
    other[:, 9:] = 7
    logits, others = gpt(ids), gpt(other)
    assert logits.shape == (2, 16, 256)
    assert torch.equal(logits[:, :9], others[:, :9]) and not torch.equal(logits[:, 9:], others[:, 9:])


def test_blocks_hold_the_text_in_order() -> None:
    blocks = recipe.cut_into_blocks(["Grüße", "und mehr"], 4)
    stream = "Grüße\nund mehr".encode()
    assert blocks.shape == (3, 5)
    assert [bytes(block.tolist()) for block in blocks] == [stream[:5], stream[4:9], stream[8:13]]
    with pytest.raises(ValueError, match="more than --block-length = 40 bytes, found 16"):
        recipe.cut_into_blocks(["Grüße", "und mehr"], 40)


def test_arguments_that_cannot_work() -> None:
    for wrong in ("--heads=3", "--precision=8", "--accumulate=0", "--hook=spardl"):
        with pytest.raises(SystemExit):
            recipe.parse_arguments([wrong])
