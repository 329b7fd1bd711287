"""What all tests share: quick, repeatable hypothesis profiles and one thread per process."""

import os
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# A shared machine's pauses say nothing about the code, so no example has a deadline. CI repeats its examples.
settings.register_profile("work", deadline=None, max_examples=50)
settings.register_profile("ci", settings.get_profile("work"), derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "work")

# The suite runs in one process per core; the programs that tests start inherit the same measure.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C works, and in child processes too, though whoever started the tests may have it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
