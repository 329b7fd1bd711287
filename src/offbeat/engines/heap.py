"""The C library's heap, told to keep large blocks.

A model-sized tensor is freed and asked for again at every local step. By default such blocks go back
to the system each time, and every page of the next one costs a fault.
"""

import ctypes
import sys

_TRIM, _TOP_PAD, _MMAP = -1, -2, -3  # numbers of glibc's mallopt
_LARGE = 1 << 25  # the most that glibc takes


def keep_large_blocks() -> bool:
    """For this process and those it forks; whether the C library knows how."""
    if not sys.platform.startswith("linux"):
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:  # another C library
        return False
    return bool(set_option(_MMAP, _LARGE) and set_option(_TRIM, 1 << 30) and set_option(_TOP_PAD, 1 << 26))
