import struct
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offbeat.deploy.protocol.messages import DTYPES, byte_size, describe_difference, pack, specs_of, unpack
from offbeat.deploy.protocol.strict_json import Reason, Rejected, quote
from offbeat.errors import InputError


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    raw = torch.from_numpy(np.random.default_rng(draw(st.integers(0, 99))).integers(0, 100, shape))
    return (raw % 2 if dtype is torch.bool else raw).to(dtype)


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


@given(st.lists(tensors(), max_size=5))
def test_what_is_packed_comes_back(leaves: list[Tensor]) -> None:
    form, data = specs_of(leaves), pack(leaves)
    assert len(data) == byte_size(form)
    back = unpack(data, form)
    assert specs_of(back) == form
    assert all(same(one, other) for one, other in zip(leaves, back, strict=True))


def test_the_bytes_are_the_numbers_in_order_little_endian_and_nothing_else() -> None:
    tree = {
        "b": torch.tensor([[1.5, -2.0], [0.25, 3.0]]).T,
        "a": torch.tensor(7, dtype=torch.int16),
        "c": torch.tensor([True]),
    }
    assert specs_of(tree) == (("int16", ()), ("float32", (2, 2)), ("bool", (1,)))
    assert pack(tree) == struct.pack("<h4f?", 7, 1.5, 0.25, -2.0, 3.0, True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "uint8"])
def test_a_machine_of_the_other_order_turns_its_bytes_around(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaf = torch.arange(6).reshape(2, 3).to(DTYPES[dtype])
    there = pack(leaf)
    monkeypatch.setattr("offbeat.deploy.protocol.messages.sys", SimpleNamespace(byteorder="big"))
    turned = pack(leaf)
    size = DTYPES[dtype].itemsize
    assert turned == b"".join(there[n : n + size][::-1] for n in range(0, len(there), size))
    assert same(unpack(turned, specs_of(leaf))[0], leaf)


def test_leaves_that_are_views_are_packed_as_they_look() -> None:
    rows = torch.arange(12.0).reshape(3, 4)
    views = [rows[1:], rows[:, 1], rows.T, torch.tensor(5.0).expand(1), torch.tensor(5.0).expand(3), rows[:0]]
    plain = [torch.tensor(view.tolist()).reshape(view.shape) for view in views]
    assert pack(views) == b"".join(struct.pack(f"<{one.numel()}f", *one.flatten().tolist()) for one in plain)


def test_extreme_numbers_keep_every_bit() -> None:
    bits = torch.tensor([0x7F800001, 0x7FC00000, 0x00000001, -0x80000000, 0x7F7FFFFF], dtype=torch.int32)
    (back,) = unpack(pack(bits.view(torch.float32)), (("float32", (5,)),))
    assert torch.equal(back.view(torch.int32), bits)


def test_the_leaves_have_memory_of_their_own() -> None:
    data = bytearray(pack([torch.tensor([1], dtype=torch.uint8), torch.tensor([2.0])]))
    one, other = unpack(memoryview(data), (("uint8", (1,)), ("float32", (1,))))
    data[:] = bytes(len(data))
    other += 1
    assert (one.item(), other.item()) == (1, 3.0)


@pytest.mark.parametrize("given", [b"", b"1234567", b"123456789", bytes(10**6)])
def test_bytes_of_another_length_are_rejected(given: bytes) -> None:
    with pytest.raises(Rejected, match="bytes") as rejected:
        unpack(given, (("float32", (2,)),))
    assert rejected.value.reason is Reason.SIZE


def test_a_form_that_claims_more_than_there_is_allocates_nothing() -> None:
    with pytest.raises(Rejected):
        unpack(b"1234", (("float64", (2**40, 2**40)),))


def test_a_truth_value_is_true_or_false() -> None:
    with pytest.raises(Rejected, match="neither"):
        unpack(b"\x01\x02", (("bool", (2,)),))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint32, torch.float8_e4m3fn])
def test_other_dtypes_do_not_travel(dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match=r"cannot be sent: use one of"):
        pack([torch.zeros(2).to(dtype)])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((("float32", (3,)),), ""),
        ((), "0 tensors, not 1"),
        ((("float32", (4,)),), "tensor 0 is 4 float32, not 3 float32"),
        ((("float64", ()),), "tensor 0 is one float64, not 3 float32"),
        ((("int8", (1, 2, 3, 4, 5)),), "tensor 0 is 1 by 2 by 3 by 4 by more int8, not 3 float32"),
    ],
)
def test_a_difference_of_forms_is_said(given: tuple[tuple[str, tuple[int, ...]], ...], said: str) -> None:
    assert describe_difference(given, (("float32", (3,)),)) == said


@given(st.text() | st.binary() | st.integers() | st.lists(st.integers()) | st.none())
def test_what_a_stranger_sent_is_quoted_on_one_short_plain_line(value: object) -> None:
    quoted = quote(value)
    assert quoted.isascii()
    assert quoted.isprintable()
    assert len(quoted) < 50


def test_a_short_value_is_quoted_whole_and_a_long_one_is_cut() -> None:
    assert quote("x" * 40) == f"'{'x' * 40}'"
    assert quote(10**41) == str(10**41)
    assert quote(10**42) == f"1{'0' * 39}..."
