import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.algorithms import Setting, build
from offbeat.engines.simulation import Vectorised
from offbeat.errors import InputError
from offbeat.schedule.availability import Cycle, Dropout
from offbeat.schedule.delays import Tiers
from offbeat.schedule.dispatch import Asynchronous, Poisson, RoundRefill, Synchronous
from offbeat.training import checkpoint
from offbeat.training.checkpoint import Checkpoint
from offbeat.training.loop import train
from worlds import SEED, make_world

STATE = Checkpoint(
    {"version": 3, "time": 0.1 + 0.2, "names": ["a", "ü"]},
    {
        "x": torch.arange(6.0).reshape(2, 3).mT,
        "double": torch.tensor([0.1], dtype=torch.float64),
        "scalar": torch.tensor(7),
        "nothing": torch.zeros(0, 4),
        "flags": torch.tensor([True, False]),
    },
)


def equal(one: Checkpoint, other: Checkpoint) -> bool:
    return (
        one.facts == other.facts
        and one.tensors.keys() == other.tensors.keys()
        and all(
            a.dtype == other.tensors[n].dtype and torch.equal(a, other.tensors[n])
            for n, a in one.tensors.items()
        )
    )


def test_what_is_saved_is_loaded_with_every_bit_shape_and_type(tmp_path):
    path = tmp_path / "deep" / "state.safetensors"
    checkpoint.save(path, STATE)
    assert equal(checkpoint.load(path), STATE)
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_place_may_be_named_as_text(tmp_path):
    checkpoint.save(f"{tmp_path}/state", STATE)
    assert equal(checkpoint.load(f"{tmp_path}/state"), STATE)


@pytest.mark.parametrize("name", ["part", "state.part", ".part"])
def test_nothing_else_in_the_folder_is_touched(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis").write_text("precious")
    checkpoint.save(tmp_path / "state", STATE)
    assert (tmp_path / name / "thesis").read_text() == "precious"


def test_tensors_that_share_memory_are_saved_each_on_its_own(tmp_path):
    x = torch.arange(4.0)
    state = Checkpoint({}, {"x": x, "again": x, "part": x[1:3]})
    checkpoint.save(tmp_path / "state", state)
    assert equal(checkpoint.load(tmp_path / "state"), state)


def test_a_checkpoint_can_be_read_by_whoever_may_enter_its_folder(tmp_path):
    tmp_path.chmod(0o755)
    checkpoint.save(tmp_path / "state", STATE)
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("broken", ["save_file", "fsync", "replace"])
def test_a_crash_in_the_middle_of_writing_leaves_the_old_file(tmp_path, monkeypatch, broken):
    path = tmp_path / "state"
    checkpoint.save(path, STATE)

    def crash(*words, **more):
        raise KeyboardInterrupt

    def half(tensors, part, metadata):
        Path(part).with_name(".tmp123").write_bytes(b"half of it")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        match broken:
            case "save_file":
                patch.setattr(checkpoint, "save_file", half)
            case "fsync":
                patch.setattr(os, "fsync", crash)
            case _:
                patch.setattr(Path, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(path, Checkpoint({"version": 4}, {}))
    assert equal(checkpoint.load(path), STATE)
    checkpoint.save(path, Checkpoint({"version": 4}, {}))
    assert checkpoint.load(path).facts == {"version": 4}
    assert [each.name for each in tmp_path.iterdir()] == ["state"]  # what the crash left is swept away


def test_a_full_disk_is_an_os_error_that_names_the_file(tmp_path, monkeypatch):
    def full(tensors, part, metadata):
        raise checkpoint.SafetensorError("No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="No space left") as caught:
        checkpoint.save(tmp_path / "state", STATE)
    assert str(tmp_path) in caught.value.filename


@settings(max_examples=60)
@given(data=st.data())
def test_a_file_that_lost_its_end_or_a_bit_is_refused_in_one_sentence(data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state"
        checkpoint.save(path, STATE)
        whole = bytearray(path.read_bytes())
        place = data.draw(st.integers(0, len(whole) - 1))
        if data.draw(st.booleans()):
            path.write_bytes(whole[:place])
        else:
            whole[place] ^= 1 << data.draw(st.integers(0, 7))
            path.write_bytes(whole)
        with pytest.raises(InputError, match="remove it, and begin again from version 0"):
            checkpoint.load(path)


def test_a_file_that_is_none_is_refused(tmp_path):
    with pytest.raises(InputError, match="there is no checkpoint at") as caught:
        checkpoint.load(tmp_path / "nothing")
    assert "--" not in str(caught.value)  # who calls this from Python has no options
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="cannot be read"):
        checkpoint.load(tmp_path / "folder")


ROUNDS = 8
DISPATCH = {
    "synchronous": Synchronous(3),
    "hand-out-before": Asynchronous(4, eager=True),
    "hand-out-after": Asynchronous(4, eager=False),
    "rounds": RoundRefill(4),
    "poisson": Poisson(0.5),
}


@pytest.mark.parametrize(
    "name", ["adamasfl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fadas-da", "fedavgm"))]
)
@pytest.mark.parametrize("rule", DISPATCH)
def test_cut_anywhere_and_resumed_from_a_file_a_run_ends_with_the_same_bits(rule, name, tmp_path):
    world = make_world()
    engine = Vectorised(
        world.problem, world.population, Tiers("large"), availability=Cycle(20, 0.7), dropout=Dropout(0.2)
    )
    algorithm = build(name, Setting(3, 3, ROUNDS), {})

    def play(resume=None):
        return train(
            algorithm,
            engine,
            dispatch=DISPATCH[rule],
            buffer=3,
            rounds=ROUNDS,
            max_staleness=6,
            seed=SEED,
            resume=resume,
        )

    whole = []
    for shot in play():
        checkpoint.save(tmp_path / str(shot.version), shot.checkpoint())
        whole.append(shot)
    assert sum(shot.counts.lost for shot in whole) > 0
    for cut in range(ROUNDS):
        again = list(play(checkpoint.load(tmp_path / str(cut))))
        assert [shot.version for shot in again] == list(range(cut + 1, ROUNDS + 1))
        for one, other in zip(again, whole[cut + 1 :], strict=True):
            assert torch.equal(one.x, other.x)
            assert (one.time, one.filled, one.cohort, one.counts) == (
                other.time,
                other.filled,
                other.cohort,
                other.counts,
            )
        checkpoint.save(tmp_path / "last", again[-1].checkpoint())
        assert equal(checkpoint.load(tmp_path / "last"), checkpoint.load(tmp_path / str(ROUNDS)))
