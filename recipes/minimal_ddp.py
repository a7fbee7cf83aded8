"""Train a small network on handwritten digits with DDP and DeAR; numbers mark what plain DDP has not.

    torchrun --nproc-per-node 2 recipes/minimal_ddp.py
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_hooks import DearState, dear_hook


def main() -> None:
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = "cuda" if on_gpu else "cpu"
    dist.init_process_group("nccl" if on_gpu else "gloo")

    digits = load_digits()
    dataset = TensorDataset(torch.tensor(digits.data).float(), torch.tensor(digits.target))
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    ddp = DistributedDataParallel(model, bucket_cap_mb=5, gradient_as_bucket_view=True)  # 1. begin early, copy nothing
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    state = DearState(ddp, optimizer)  # 2. each rank keeps a part of the optimizer's state
    ddp.register_comm_hook(state, dear_hook)  # 3. gradients travel in backward, parameters in forward

    for epoch in range(5):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}   loss {loss.item():.4f}")

    state.close()  # 4. the last parameters have arrived
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
