"""Train a Llama that FSDP2 shards, with faster and narrower communication on CPUs: ``extend`` after ``fully_shard``.

    torchrun --nproc-per-node 2 recipes/fsdp2.py
    torchrun --nproc-per-node 2 recipes/fsdp2.py --all-gather bf16 --reduce-scatter int8
    torchrun --nproc-per-node 2 recipes/fsdp2.py --reduce-scatter sparse --density 0.02 --save-every 50
    torchrun --nproc-per-node 3 recipes/fsdp2.py --resume build/fsdp2/step-50

Without options the losses are those of FSDP2. Any number of ranks resumes a checkpoint. The model is small and reads
bytes; the text is Python's own documentation unless ``--text`` names yours.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from tqdm import trange
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_ext import ExtConfig, Extension, extend, restore
from recipes.common.batches import endless_batches
from recipes.common.byte_text import NUM_BYTES, load_blocks
from recipes.common.processes import log_loss, pick_device, process_group
from recipes.common.texts import add_text_arguments, positive, read_texts


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    texts = read_texts(args)  # before ranks wait for each other: what fails here fails on all of them
    device = pick_device(args.device)
    with process_group(device):
        train(args, texts, device)


def train(args: argparse.Namespace, texts: list[str], device: torch.device) -> None:
    blocks, _ = load_blocks(texts, args.block_length)
    torch.manual_seed(args.seed)
    model = make_llama().to(device)
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.bf16 else MixedPrecisionPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=precision)
    fully_shard(model, mp_policy=precision)
    config = ExtConfig(all_gather=args.all_gather, reduce_scatter=args.reduce_scatter, density=args.density)
    extension = extend(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    first = load(args.resume, model, optimizer, extension) if args.resume is not None else 0
    batches = itertools.islice(endless_batches(blocks, args.batch_size), first, None)  # not those that were read before
    for step in trange(first + 1, args.steps + 1, disable=dist.get_rank() != 0):
        loss = model(**{name: ids.to(device) for name, ids in next(batches).items()}).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
        if step % args.log_every == 0 or step == args.steps:
            log_loss(step, loss)
        if args.save_every is not None and step % args.save_every == 0:
            save(args.output / f"step-{step}", model, optimizer, extension, step)
    if dist.get_rank() == 0:
        print(f"sent {extension.stats().sent_bytes / 1e6:.1f} MB in all")
    restore(model)


def make_llama() -> Any:
    sizes: Any = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=NUM_BYTES, use_cache=False, **sizes))


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, extension: Extension, step: int) -> None:
    """Write a checkpoint, every rank its shards and its residuals, which rounding or selection left out."""
    weights, moments = get_state_dict(model, optimizer)
    content = {"model": weights, "optimizer": moments, "residuals": extension.state_dict(), "step": torch.tensor(step)}
    dcp.save(content, checkpoint_id=folder)


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, extension: Extension) -> int:
    """Read a checkpoint of the same settings; return the number of steps made."""
    weights, moments = get_state_dict(model, optimizer)
    residuals, step = extension.state_dict(), torch.tensor(0)
    content = {"model": weights, "optimizer": moments, "residuals": residuals, "step": step}
    dcp.load(content, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    extension.load_state_dict(residuals)
    return int(step)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a Llama with FSDP2 and fsdp_ext.")
    add = parser.add_argument
    add("--all-gather", choices=["exact", "bf16", "int8", "int4"], default="exact", help="of parameters")
    add("--reduce-scatter", choices=["exact", "bf16", "int8", "int4", "sparse"], default="exact", help="of gradients")
    add("--density", type=float, help="part of the gradients that travels, if sparse; 0.01 without it")
    add("--bf16", action="store_true", help="compute and gather in bfloat16, sum in float32")
    add("--steps", type=positive, default=100)
    add("--batch-size", type=positive, default=8, help="blocks per rank and step")
    add("--block-length", type=positive, default=128, help="bytes that the model sees at once")
    add("--lr", type=float, default=2e-3)
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    add("--log-every", type=positive, default=10, metavar="STEPS")
    add("--save-every", type=positive, metavar="STEPS")
    add("--output", type=Path, default=Path("build/fsdp2"), metavar="FOLDER", help="for checkpoints")
    add("--resume", type=Path, metavar="FOLDER", help="a checkpoint, such as build/fsdp2/step-50")
    add("--seed", type=int, default=0)
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add_text_arguments(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
