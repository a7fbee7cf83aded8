"""Train a Llama whose parameters are sharded by FSDP2, with FSDP2's own communication or with rings.

    torchrun --nproc-per-node 2 recipes/complete/llama_fsdp2.py
    torchrun --nproc-per-node 2 recipes/complete/llama_fsdp2.py --hook none
    torchrun --nproc-per-node 2 recipes/complete/llama_fsdp2.py --bf16 --keep-parameters --accumulate 2
    torchrun --nproc-per-node 2 recipes/complete/llama_fsdp2.py --all-gather bf16 --reduce-scatter int8
    torchrun --nproc-per-node 2 recipes/complete/llama_fsdp2.py --reduce-scatter sparse --density 0.02
    torchrun --nproc-per-node 2 recipes/complete/llama_fsdp2.py --save-every 50
    torchrun --nproc-per-node 3 recipes/complete/llama_fsdp2.py --resume build/recipes/checkpoint-50
    torchrun --nproc-per-node 8 recipes/complete/llama_fsdp2.py --model meta-llama/Llama-3.2-1B --bf16 --lr 2e-5 \\
        --dataset Salesforce/wikitext --dataset-config wikitext-2-raw-v1

The extension is one line, ``extend``, after ``fully_shard``; on GPUs it leaves FSDP2's own communication as it is.
Checkpoints are PyTorch's distributed ones, which any number of ranks can resume, with either communication.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # `recipes`, when this file runs as a script

from fsdp_ext import ExtConfig, Extension, extend, restore
from recipes.common.processes import mean_over_ranks, pick_device, process_group
from recipes.common.record import Record, command_of, now, report, surroundings
from recipes.common.schedules import warmed_cosine
from recipes.common.texts import positive, read_texts
from recipes.complete.gpt2_clm_trainer import own_labels
from recipes.complete.trainer_base import Task, make_model, make_parser, parse, prepare_text

RECIPE = "llama_fsdp2"


def main(argv: Sequence[str] | None = None) -> Record:
    args = parse_arguments(argv)
    texts = read_texts(args)  # before ranks wait for each other: what fails here fails on all of them
    device = pick_device("cuda" if torch.cuda.is_available() else "cpu")
    with process_group(device):
        return run(args, argv, make_task(args, texts), device)


def run(args: argparse.Namespace, argv: Sequence[str] | None, task: Task, device: torch.device) -> Record:
    """All of training, on ranks that have met."""
    model = shard(task.model.to(device), args.bf16, args.keep_parameters)
    extension = extend(model, config_of(args)) if args.hook == "ring" else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = LambdaLR(optimizer, warmed_cosine(max(1, args.steps // 10), args.steps))
    first_step = load(args.resume, model, optimizer, schedule, extension) if args.resume is not None else 0
    losses = train(args, model, optimizer, schedule, extension, batches(args, task, device, first_step), first_step)
    sent_mb, stall_s = costs(extension, args.steps - first_step)
    held_out_loss = evaluate(args, model, task, device)
    record = Record(
        recipe=RECIPE,
        hook=name_of(args),
        command=command_of(RECIPE, argv),
        created=now(),
        environment=surroundings(),
        data=task.data,
        num_workers=dist.get_world_size(),
        steps=args.steps,
        losses=losses,
        held_out={"loss": held_out_loss},
        sent_mb_per_step=sent_mb,
        stall_s_per_step=stall_s,
        model=task.about,
    )
    if dist.get_rank() == 0:
        report(record, args.output)
    restore(model)
    return record


def make_task(args: argparse.Namespace, texts: list[str]) -> Task:
    """A Llama that predicts each token from those before it."""
    text = prepare_text(args, texts, marked=False)
    config = LlamaConfig(
        vocab_size=len(text.tokenizer),
        max_position_embeddings=args.block_length,
        hidden_size=args.hidden_size,
        intermediate_size=4 * args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = make_model(args, AutoModelForCausalLM, config)
    model.config.use_cache = False
    return Task(model, text.training, text.held_out, own_labels, text.data)


def shard(model: nn.Module, in_bf16: bool, keeps_parameters: bool) -> nn.Module:
    """Every layer by itself, then embedding, norm and head with the model."""
    options: dict[str, Any] = {"reshard_after_forward": not keeps_parameters}
    if in_bf16:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers: Any = model.get_submodule("model.layers")
    for layer in layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def config_of(args: argparse.Namespace) -> ExtConfig:
    """How parameters and gradients travel."""
    return ExtConfig(all_gather=args.all_gather, reduce_scatter=args.reduce_scatter, density=args.density)


def name_of(args: argparse.Namespace) -> str:
    """Of the communication, in results."""
    gather = "" if args.all_gather == "exact" else f"-gather-{args.all_gather}"
    scatter = "" if args.reduce_scatter == "exact" else f"-scatter-{args.reduce_scatter}"
    return f"{args.hook}{gather}{scatter}"


def batches(args: argparse.Namespace, task: Task, device: torch.device, first_step: int) -> Iterator[dict[str, Tensor]]:
    """This rank's, without end, in another order in every epoch; those of steps that were made already are left out."""
    sampler: DistributedSampler[Any] = DistributedSampler(task.training, seed=args.seed, drop_last=True)
    loader: DataLoader[Any] = DataLoader(
        task.training, args.batch_size, sampler=sampler, collate_fn=task.collate, drop_last=True
    )
    if len(loader) == 0:
        raise SystemExit(f"error: too little text for {args.batch_size} blocks on each of {sampler.num_replicas} ranks")
    epoch, done = divmod(first_step * args.accumulate, len(loader))
    while True:
        sampler.set_epoch(epoch)
        for index, batch in enumerate(loader):
            if index >= done:
                yield {name: value.to(device) for name, value in batch.items()}
        epoch, done = epoch + 1, 0


def train(
    args: argparse.Namespace,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: LambdaLR,
    extension: Extension | None,
    source: Iterator[dict[str, Tensor]],
    first_step: int,
) -> list[list[float]]:
    """The training loop, the same with and without the extension; returns pairs of step and loss, mean over ranks."""
    assert isinstance(model, FSDPModule) and isinstance(model, nn.Module)
    losses: list[list[float]] = []
    since_log: list[Tensor] = []
    for step in range(first_step + 1, args.steps + 1):
        for part in range(args.accumulate):
            model.set_requires_gradient_sync(part == args.accumulate - 1)
            loss = model(**next(source)).loss / args.accumulate
            loss.backward()
            since_log.append(loss.detach() * args.accumulate)
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % args.log_every == 0 or step == args.steps:
            losses.append([step, mean_over_ranks(torch.stack(since_log).mean())])
            since_log.clear()
            if dist.get_rank() == 0:
                print(f"step {step:5d}   loss {losses[-1][1]:.4f}", flush=True)
        if args.save_every is not None and step % args.save_every == 0:
            save(args.output / f"checkpoint-{step}", model, optimizer, extension, step)
    return losses


@torch.no_grad()
def evaluate(args: argparse.Namespace, model: nn.Module, task: Task, device: torch.device) -> float:
    """Mean loss of held-out blocks; ranks run forwards together, so each takes as many batches."""
    model.eval()
    sampler: DistributedSampler[Any] = DistributedSampler(task.held_out, shuffle=False)
    loader: DataLoader[Any] = DataLoader(task.held_out, args.batch_size, sampler=sampler, collate_fn=task.collate)
    found = [model(**{name: value.to(device) for name, value in batch.items()}).loss for batch in loader]
    model.train()
    return mean_over_ranks(torch.stack(found).mean())


def costs(extension: Extension | None, num_steps: int) -> tuple[float | None, float | None]:
    """MB sent and seconds waited per step; None where nothing counts."""
    stats = extension.stats() if extension is not None else None
    if stats is None or stats.gathers == 0 or num_steps == 0:
        return None, None
    return stats.sent_bytes / 1e6 / num_steps, stats.stall_s / num_steps


# Checkpoints --------------------------------------------------------------------------------------------


def save(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, extension: Extension | None, step: int
) -> None:
    """Every rank writes its shards, and what gradients have lost so far."""
    weights, state = get_state_dict(model, optimizer)
    lost = extension.state_dict() if extension is not None else {}
    everything = {"model": weights, "optimizer": state, "step": torch.tensor(step), "lost": lost}
    dcp.save(everything, checkpoint_id=folder)


def load(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, schedule: LambdaLR, extension: Extension | None
) -> int:
    """Go on from there; returns the steps that were made."""
    weights, state = get_state_dict(model, optimizer)
    step = torch.tensor(0)
    everything: dict[str, Any] = {"model": weights, "optimizer": state, "step": step}
    lost = extension.state_dict() if extension is not None else {}
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    if any(name.startswith("lost.") for name in saved):  # by a run that loses something
        everything["lost"] = lost
    dcp.load(everything, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    if extension is not None and "lost" in everything:
        extension.load_state_dict(lost)
    schedule.last_epoch = int(step) - 1
    schedule.step()
    return int(step)


# Command line -------------------------------------------------------------------------------------------


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser("Train a Llama with FSDP2.", hooks=["ring", "none"])
    parser.add_argument("--all-gather", choices=["exact", "bf16", "int8"], default="exact", help="of parameters")
    parser.add_argument(
        "--reduce-scatter", choices=["exact", "bf16", "int8", "sparse"], default="exact", help="of gradients"
    )
    parser.add_argument("--density", type=float, help="part of the gradients that travels, if sparse (0.01)")
    parser.add_argument("--bf16", action="store_true", help="compute and gather in bfloat16, sum in float32")
    parser.add_argument("--keep-parameters", action="store_true", help="whole between forward and backward")
    parser.add_argument("--accumulate", type=positive, default=1, metavar="BATCHES", help="per step and rank")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    parser.add_argument("--save-every", type=positive, metavar="STEPS", help="checkpoints, in the folder of --output")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="a checkpoint to go on from")
    args = parse(parser, argv)
    if args.resume is not None and not (args.resume / ".metadata").exists():
        parser.error(f"--resume expects the folder of a checkpoint, found none at {args.resume}")
    if args.hook == "none" and name_of(args) != "none":
        parser.error("--all-gather and --reduce-scatter are the extension's: leave --hook none out")
    return args


if __name__ == "__main__":
    main()
