"""The C library's heap."""

import sys

import pytest
import torch

from offbeat.engines.heap import keep_large_blocks


def test_large_blocks_are_used_again_after_they_were_freed() -> None:
    if not keep_large_blocks():
        assert not sys.platform.startswith("linux")
        pytest.skip("this C library has no mallopt")
    places = set()
    for _ in range(6):
        block = torch.empty(2_000_000)
        places.add(block.data_ptr())
        del block
    assert len(places) == 1
