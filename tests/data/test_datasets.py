import gzip
import json
import lzma
import struct

import numpy as np
import pytest
import torch

from offbeat.data import datasets, shakespeare
from offbeat.data.datasets import load
from offbeat.errors import InputError

RNG = np.random.default_rng(0)
SPEECH = "To be, or not to be: that is the question; whether 'tis nobler in the mind to suffer.\n"


def idx_bytes(values):
    return struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()


def idx_files(train=12, test=5):
    made = {}
    for kind, count in (("train", train), ("t10k", test)):
        images = RNG.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        made[f"{kind}-images-idx3-ubyte"] = idx_bytes(images)
        made[f"{kind}-labels-idx1-ubyte"] = idx_bytes(labels)
    return made


def write(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


def cifar_files(rows=4):
    names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    made = {}
    for name in names:
        table = RNG.integers(0, 256, (rows, 3073), dtype=np.uint8)
        table[:, 0] = np.arange(rows) % 10
        made[name] = table.tobytes()
    return made


def test_digits_are_split_by_label_once_and_for_all():
    source = load("digits")
    assert source.train.inputs.shape == (1437, 64)
    assert source.test.inputs.shape == (360, 64)
    assert source.train.inputs.dtype == torch.float32
    assert (source.train.inputs.min(), source.train.inputs.max()) == (0, 1)
    assert np.array_equal(source.train.targets, source.labels)
    tested, trained = (np.bincount(part) for part in (source.test.targets, source.labels))
    assert np.abs(tested - (tested + trained) / 5).max() < 1
    assert torch.equal(source.train.inputs, load("digits").train.inputs)
    everything = {row.numpy().tobytes() for part in (source.train, source.test) for row in part.inputs}
    assert len(everything) == 1797  # scikit-learn's digits, all different


@pytest.mark.parametrize(("name", "place"), [("mnist", "MNIST/raw"), ("fashion-mnist", "FashionMNIST/raw")])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("pack", ["", ".gz", ".xz"])
def test_idx_files_are_read_plain_or_packed_and_in_either_layout(tmp_path, name, place, nested, pack):
    packers = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}
    files = idx_files()
    folder = tmp_path / place if nested else tmp_path
    write(folder, {f"{file}{pack}": packers[pack](data) for file, data in files.items()})
    source = load(name, tmp_path)
    mean, deviation = {"mnist": (0.1307, 0.3081), "fashion-mnist": (0.2860, 0.3530)}[name]
    pixels = np.frombuffer(files["train-images-idx3-ubyte"], np.uint8, offset=16).reshape(12, 1, 28, 28)
    np.testing.assert_allclose(source.train.inputs, (pixels / 255 - mean) / deviation, atol=1e-5)
    assert source.train.inputs.dtype == torch.float32
    assert source.train.targets.tolist() == [*range(10), 0, 1]
    assert source.test.inputs.shape == (5, 1, 28, 28)
    assert (source.classes, source.groups) == (10, None)


@pytest.mark.parametrize("place", ["", "cifar-10-batches-bin"])
def test_cifar10_is_read_in_its_official_layout(tmp_path, place):
    files = cifar_files()
    write(tmp_path / place, files)
    source = load("cifar10", tmp_path)
    assert source.train.inputs.shape == (20, 3, 32, 32)
    assert source.test.inputs.shape == (4, 3, 32, 32)
    assert source.labels.tolist() == [0, 1, 2, 3] * 5
    second = np.frombuffer(files["data_batch_2.bin"], np.uint8).reshape(4, 3073)[1, 1:]
    blue = (second[2048:].reshape(32, 32) / 255 - 0.4465) / 0.2616
    np.testing.assert_allclose(source.train.inputs[5, 2], blue, atol=1e-5)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "shakespeare"])
def test_a_missing_file_is_named_and_nothing_is_downloaded_into_a_folder_of_the_user(
    tmp_path, name, monkeypatch
):
    monkeypatch.setattr(datasets, "fetch", lambda *_: pytest.fail("downloaded"))
    file = {"cifar10": "data_batch_1.bin", "shakespeare": "by_role.json"}.get(name, "train-images-idx3-ubyte")
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InputError, match=f"{file}.* is not in {folder}.* download it from http"):
            load(name, folder)


def test_the_cache_is_read_before_anything_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.setenv("OFFBEAT_DATA", str(tmp_path))
    asked = []
    monkeypatch.setattr(datasets, "fetch", lambda item, folder: asked.append((item.archive, folder)))
    with pytest.raises(InputError, match="is not in"):
        load("cifar10", download=False)
    assert not asked
    with pytest.raises(InputError, match="is not in"):
        load("cifar10")
    assert asked == [("cifar-10-binary.tar.gz", tmp_path / "cifar10")]
    write(tmp_path / "cifar10", cifar_files())
    assert load("cifar10").train.total == 20
    assert len(asked) == 1


@pytest.mark.parametrize("file", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: data[:-1], "its header announces"),
        (lambda data: data + b"x", "its header announces"),
        (lambda data: data[:6], "its header is truncated"),
        (lambda data: b"", "not an idx file"),
        (lambda data: b"<html>", "not an idx file"),
        (lambda data: idx_bytes(np.zeros((2, 2), np.uint8)), "2 axes instead of"),
    ],
)
def test_a_damaged_idx_file_is_named(tmp_path, file, damage, says):
    files = idx_files()
    write(tmp_path, files | {file: damage(files[file])})
    with pytest.raises(InputError, match=f"{tmp_path / file} cannot be used, it.*{says}|{file}.*{says}"):
        load("mnist", tmp_path)


@pytest.mark.parametrize("pack", ["gz", "xz"])
@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9], lambda data: b"no" + data[2:], lambda data: data[:40]]
)
def test_a_damaged_packed_file_is_named(tmp_path, pack, damage):
    packer = {"gz": gzip.compress, "xz": lzma.compress}[pack]
    files = idx_files()
    bad = files.pop("train-images-idx3-ubyte")
    write(tmp_path, files | {f"train-images-idx3-ubyte.{pack}": damage(packer(bad))})
    with pytest.raises(InputError, match=f"train-images-idx3-ubyte.{pack} is truncated or corrupt"):
        load("mnist", tmp_path)


def test_labels_out_of_range_are_corrupt_files(tmp_path):
    write(tmp_path, idx_files() | {"train-labels-idx1-ubyte": idx_bytes(np.full(12, 10, np.uint8))})
    with pytest.raises(InputError, match="train-labels-idx1-ubyte cannot be used, it has a label"):
        load("mnist", tmp_path)
    write(tmp_path, cifar_files() | {"data_batch_3.bin": b"\x0b" + bytes(3072)})
    with pytest.raises(InputError, match=r"data_batch_3.bin cannot be used, it has a label"):
        load("cifar10", tmp_path)


def test_images_and_labels_must_be_as_many(tmp_path):
    write(tmp_path, idx_files() | {"train-labels-idx1-ubyte": idx_bytes(np.zeros(11, np.uint8))})
    with pytest.raises(InputError, match=r"12 images and .*train-labels-idx1-ubyte 11 labels"):
        load("mnist", tmp_path)


@pytest.mark.parametrize(
    ("cut", "says"), [(-1, "not whole rows"), (-3073, "has 3 images where others have 4")]
)
def test_a_truncated_cifar_file_is_named(tmp_path, cut, says):
    files = cifar_files()
    write(tmp_path, files | {"data_batch_4.bin": files["data_batch_4.bin"][:cut]})
    with pytest.raises(InputError, match=rf"data_batch_4\.bin.*{says}"):
        load("cifar10", tmp_path)


PLAYS = f"""header

1609

THE SONNETS

by William Shakespeare

  From fairest creatures we desire increase.

1601

THE TRAGEDY OF NOBODY

by William Shakespeare


ACT I. SCENE 1.

  HAMLET. First line.
    second  line,
    third line.
  Ham Let. Another role.
  Hamlet. Fourth line.
                                       Exit HAMLET
  GHOST. Only two
    lines.

1592

THE COMEDY OF ERRORS

by William Shakespeare

DUKE. {SPEECH}and
more
<<page mark>>
lost line
EGEON. One.
Two.
three.
ACT II. SCENE 1.
lost too
"""


def test_raw_text_is_split_by_role_and_roles_with_two_lines_are_left_out():
    roles = shakespeare.roles_of_text(PLAYS)
    assert roles == {
        "THE_COMEDY_OF_ERRORS_DUKE": f"{SPEECH}and\nmore\n",
        "THE_COMEDY_OF_ERRORS_EGEON": "One.\nTwo.\nthree.\n",
        "THE_TRAGEDY_OF_NOBODY_HAMLET": "First line.\nsecond  line,\nthird line.\nFourth line.\n"
        "                                   Exit HAMLET\n",
    }


def test_windows_are_consecutive_characters_and_the_next_one():
    words = SPEECH * 5
    train, test = shakespeare.windows({"a": words, "short": "too short\n", "b": SPEECH * 3})
    text = words.replace("\n", " ")
    cut = len(text) - len(text) // 5

    def decode(symbols):
        return "".join(shakespeare.ALPHABET[symbol] for symbol in symbols)

    mine = train.inputs[train.roles == 0]
    assert len(mine) == cut - 80
    assert [decode(row) for row in mine[:2]] == [text[:80], text[1:81]]
    assert decode(train.targets[train.roles == 0]) == text[80:cut]
    assert decode(test.inputs[test.roles == 0][0]) == text[cut : cut + 80]
    assert set(train.roles) == {0, 1}
    assert train.inputs.dtype == np.uint8


def test_test_windows_follow_each_other_without_sharing_targets():
    _, test = shakespeare.windows({"a": SPEECH * 40})
    text = (SPEECH * 40).replace("\n", " ")
    tail = text[len(text) - len(text) // 5 :]
    assert len(test.inputs) == -(-(len(tail) - 80) // 80)
    assert [shakespeare.ALPHABET[symbol] for symbol in test.targets] == list(tail[80::80])


def test_the_alphabet_has_80_symbols_and_all_others_are_spaces():
    assert len(set(shakespeare.ALPHABET)) == len(shakespeare.ALPHABET) == 80
    decoded = "".join(
        shakespeare.ALPHABET[symbol] for symbol in shakespeare.encode("a\u00e9b\u2014c\U0001f600d~e   f\ng")
    )
    assert decoded == "a b c d e f g"


@pytest.mark.parametrize(
    "file", ["by_role.json", "by_role.json.xz", "pg100.txt", "pg100.txt.gz", "shakespeare.txt"]
)
def test_shakespeare_is_read_from_roles_or_from_the_raw_text(tmp_path, file):
    speeches = "".join(f"  HAMLET. {SPEECH}  GHOST. {SPEECH}" for _ in range(4))
    raw = f"\ufeffTITLE\n\n\nby William Shakespeare\n\n{speeches}"
    roles = {f"TITLE_{role}": {"play": "TITLE", "text": SPEECH * 4} for role in ("GHOST", "HAMLET")}
    data = (json.dumps(roles) if file.startswith("by_role") else raw).encode()
    data = {".gz": gzip.compress, ".xz": lzma.compress}.get(file[-3:], bytes)(data)
    write(tmp_path, {file: data})
    source = load("shakespeare", tmp_path)
    each = len(SPEECH) * 4 - len(SPEECH) * 4 // 5 - 80
    assert source.train.inputs.shape == (2 * each, 80)
    assert source.train.inputs.dtype == torch.uint8
    assert np.bincount(source.groups).tolist() == [each, each]
    assert np.array_equal(source.labels, source.train.targets)
    assert source.classes == 80


@pytest.mark.parametrize(
    ("file", "data", "says"),
    [
        ("by_role.json", b'{"a": {"text": "cut', "does not map each role"),
        ("by_role.json", b"[1, 2]", "does not map each role"),
        ("by_role.json", b'{"a": {"words": "x"}}', "does not map each role"),
        ("by_role.json", b'{"a": {"text": "brief"}}', "says more than 80 characters"),
        ("pg100.txt", b"nothing to see", "says more than 80 characters"),
        ("pg100.txt", b"\xff\xfe\x00", "utf-8"),
    ],
)
def test_a_shakespeare_file_that_is_not_one_is_named(tmp_path, file, data, says):
    write(tmp_path, {file: data})
    with pytest.raises(InputError, match=f"{file} cannot be used, .*{says}"):
        load("shakespeare", tmp_path)


def test_an_unknown_data_set_is_met_with_the_nearest_names():
    with pytest.raises(InputError, match="unknown data set 'minst': did you mean mnist"):
        load("minst")
