"""A convolutional network with BatchNorm on an array that is larger than the memory of the process.

    python examples/on_disk.py make FOLDER          # writes 1.5 GB of images
    python examples/on_disk.py train FOLDER         # trains with at most 1 GB of memory

The images stay on the disk: `ClientData` reads only the rows of the current minibatches.
"""

import resource
import sys
from pathlib import Path

import numpy as np
from torch import Tensor, nn

import offbeat


class Network(nn.Module):
    """Takes images as they are on the disk, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
            nn.Linear(128, 4),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images.float() / 255)


def task(folder: Path) -> offbeat.LearningTask:
    """Each camera is a client."""
    images = np.load(folder / "images.npy", mmap_mode="r")
    labels, cameras = np.load(folder / "labels.npy"), np.load(folder / "cameras.npy")
    train, test = offbeat.ClientData.from_arrays(images, labels, by=cameras).split(test=0.001)
    return offbeat.LearningTask(module=Network, data=train, test=test, name="cameras")


def limit_memory(size: int) -> None:
    """Let the process allocate no more than this number of bytes."""
    resource.setrlimit(resource.RLIMIT_DATA, (size, size))


def make(folder: Path, cameras: int = 40, images: int = 12_000) -> None:
    """Images of 40 cameras; the bright quadrant is the label."""
    rng = np.random.default_rng(0)
    shape = (cameras * images, 3, 32, 32)
    array = np.lib.format.open_memmap(folder / "images.npy", "w+", np.uint8, shape)
    labels = rng.integers(4, size=len(array))
    for camera in range(cameras):
        rows = slice(camera * images, (camera + 1) * images)
        noise = rng.integers(160, size=(300, 3, 32, 32), dtype=np.uint8)
        block = noise[np.arange(images) % len(noise)]
        for label in range(4):
            top, left = 16 * (label // 2), 16 * (label % 2)
            block[labels[rows] == label, :, top : top + 16, left : left + 16] += 60
        array[rows] = block
    array.flush()
    np.save(folder / "labels.npy", labels)
    np.save(folder / "cameras.npy", np.repeat([f"camera {n:02d}" for n in range(cameras)], images))


if __name__ == "__main__":
    command, place = sys.argv[1], Path(sys.argv[2])
    if command == "make":
        make(place)
    else:
        limit_memory(1_000_000_000)
        size = (place / "images.npy").stat().st_size
        result = offbeat.run(task(place), "cadence", rounds=30, local_steps=5, engine="sequential")
        print(f"{size / 1e9:.2f} GB of images, accuracy {result.best:.3f}")
