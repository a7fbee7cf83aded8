"""Images to train on: scikit-learn's handwritten digits, or a folder of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, random_split
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2


class Images(NamedTuple):
    """Pairs of image, (3, size, size) float32 in -1 … 1, and class."""

    train: Subset[tuple[Tensor, Tensor]]
    held_out: Subset[tuple[Tensor, Tensor]]
    num_classes: int
    name: str


def load_images(folder: Path | None, size: int) -> Images:
    """Load images, and hold out a fifth of them, the same on every rank.

    Args:
        folder: an ImageFolder, None for scikit-learn's 1797 handwritten digits.
        size: height and width in pixels that images are brought to.
    """
    everything, num_classes = load_digit_images(size) if folder is None else load_folder(folder, size)
    num_held_out = max(1, len(everything) // 5)
    train, held_out = random_split(
        everything, [len(everything) - num_held_out, num_held_out], torch.Generator().manual_seed(0)
    )
    return Images(train, held_out, num_classes, "scikit-learn's digits" if folder is None else str(folder))


def load_digit_images(size: int) -> tuple[TensorDataset, int]:
    digits = load_digits()
    grey = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16  # (n, 1, 8, 8)
    resized = F.interpolate(grey, size=(size, size), mode="bilinear")
    images = resized.expand(-1, 3, -1, -1) * 2 - 1
    return TensorDataset(images.contiguous(), torch.tensor(digits.target)), len(digits.target_names)


def load_folder(folder: Path, size: int) -> tuple[ImageFolder, int]:
    prepare = v2.Compose([
        v2.Resize(size),
        v2.CenterCrop(size),
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([0.5] * 3, [0.5] * 3),
    ])
    images = ImageFolder(str(folder), transform=prepare)
    return images, len(images.classes)
