import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from offbeat import (
    AdaMasFL,
    Anywhere,
    Asynchronous,
    Dropout,
    Exponential,
    InputError,
    InRam,
    Mapped,
    OnDevice,
    Sequential,
    Vectorised,
    train,
)
from offbeat.cli import main
from offbeat.data import client_store
from offbeat.data.client_store import (
    ClientStore,
    FileStore,
    TensorStore,
    free_ram,
    make_client_store,
    parse_memory_backend,
    with_folder,
)
from offbeat.training import checkpoint
from offbeat.training.build import build_run
from offbeat.training.experiment import Experiment
from offbeat.training.folder import RunFolder
from offbeat.training.runner import run_experiment
from worlds import SEED, make_world, play

CPU = torch.device("cpu")
INITIAL = (torch.ones(3), torch.zeros(2, 2, dtype=torch.float64), torch.tensor(True))
CLIENTS = 5

Make = Callable[[Path], ClientStore]
KINDS: dict[str, Make] = {
    "held": lambda folder: TensorStore(INITIAL),
    "filed": lambda folder: FileStore(INITIAL, CLIENTS, folder / "memory"),
}
ALL = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


def rows(*values: float) -> tuple[torch.Tensor, ...]:
    """A stacked row for each value."""
    count = len(values)
    column = torch.tensor(values)
    return (
        column.view(count, 1).expand(count, 3),
        column.double().view(count, 1, 1).expand(count, 2, 2) / 3,
        column > 0,
    )


def same(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True))


def row(value: float | None) -> tuple[torch.Tensor, ...]:
    return INITIAL if value is None else tuple(leaf[0] for leaf in rows(value))


@ALL
def test_a_client_that_never_wrote_has_the_initial_memory(make: Make, tmp_path: Path) -> None:
    memories = make(tmp_path)
    memories.write([4, 2], rows(7.0, -8.0))
    for client, value in ((4, 7.0), (2, -8.0), (0, None)):
        assert same(memories.read(client), row(value))


@ALL
def test_what_was_written_does_not_change_with_the_tensor_it_came_from(make: Make, tmp_path: Path) -> None:
    memories = make(tmp_path)
    values = tuple(leaf.clone() for leaf in rows(1.0))
    memories.write([0], values)
    values[0].add_(5)
    assert same(memories.read(0), row(1.0))


@ALL
def test_it_is_saved_and_loaded(make: Make, tmp_path: Path) -> None:
    memories = make(tmp_path)
    memories.write([3, 1], rows(4.0, 5.0))
    clients, columns = memories.save()
    assert clients == [1, 3]
    other = make(tmp_path)
    other.load(clients, columns)
    for client in range(CLIENTS):
        assert same(memories.read(client), other.read(client))


def test_clients_that_keep_nothing_cost_nothing(tmp_path: Path) -> None:
    memories = make_client_store(Mapped(tmp_path), (), CLIENTS, CPU)
    memories.write([0, 1], ())
    assert memories.save() == ([], [])
    assert memories.read(0) == ()
    assert list(tmp_path.iterdir()) == []


ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("write"),
            st.lists(st.integers(0, CLIENTS - 1), min_size=1, max_size=CLIENTS, unique=True),
        ),
        st.tuples(st.sampled_from(["save", "confirm", "crash", "older", "back"]), st.just([])),
    ),
    min_size=6,
    max_size=30,
)


@settings(max_examples=150)
@given(actions=ACTIONS)
@example([("write", [0]), ("save", []), ("write", [0]), ("confirm", []), ("write", [1]), ("crash", [])])
@example(
    [
        ("write", [0]),
        ("save", []),
        ("write", [0]),
        ("back", []),
        ("save", []),
        ("confirm", []),
        ("write", [1]),
    ]
)
@example([("write", [0]), ("save", []), ("write", [0]), ("save", []), ("write", [1]), ("older", [])])
def test_after_any_writes_checkpoints_and_crashes_clients_have_what_a_dict_would(
    actions: list[tuple[str, list[int]]],
) -> None:
    """A crash may leave anything where no checkpoint that may be needed refers to."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "memory"
        memories = FileStore(INITIAL, CLIENTS, path)
        model: dict[int, float] = {}
        saved = [(FileStore(INITIAL, CLIENTS, path).save(), model)]  # those that may be loaded
        value = 0.0
        for action, clients in actions:
            if action == "write":
                values = [value := value + 1.0 for _ in clients]
                memories.write(clients, rows(*values))
                model = model | dict(zip(clients, values, strict=True))
            elif action == "save":
                saved.append((memories.save(), model))
            elif action == "confirm":
                memories.confirm()
                saved = saved[-1:]
            else:
                facts, model = saved[0] if action == "older" else saved[-1]
                used = {int(slot) for (_, table), _ in saved for slot in table[0]}
                _scribble(path, used)
                if action != "back":
                    memories = FileStore(INITIAL, CLIENTS, path)
                memories.load(*facts)
                saved = [(facts, model)]
            for client in range(CLIENTS):
                assert same(memories.read(client), row(model.get(client)))


def _scribble(path: Path, used: set[int]) -> None:
    if path.exists():
        with path.open("r+b") as file:
            for slot in set(range(3 * CLIENTS)) - used:
                file.seek(4096 * slot)
                file.write(b"\xff" * 4096)


def test_checkpoints_that_are_confirmed_keep_the_file_within_two_rows_a_client(tmp_path: Path) -> None:
    memories = FileStore(INITIAL, CLIENTS, tmp_path / "memory")
    for turn in range(20):
        memories.write(list(range(CLIENTS)), rows(*[float(turn)] * CLIENTS))
        memories.write([turn % CLIENTS], rows(float(-turn)))
        memories.save()
        memories.confirm()
    assert (tmp_path / "memory").stat().st_size <= 2 * CLIENTS * 4096


def test_without_checkpoints_rows_are_written_in_place(tmp_path: Path) -> None:
    memories = FileStore(INITIAL, CLIENTS, tmp_path / "memory")
    for turn in range(20):
        memories.write(list(range(CLIENTS)), rows(*[float(turn)] * CLIENTS))
    assert (tmp_path / "memory").stat().st_size <= CLIENTS * 4096


def test_rows_are_on_the_disk_before_a_checkpoint_refers_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda number: synced.append(str(Path(f"/proc/self/fd/{number}").readlink()))
    )
    memories = FileStore(INITIAL, CLIENTS, tmp_path / "memory")
    memories.write([0], rows(1.0))
    assert synced == []
    memories.save()
    assert synced == [str(tmp_path / "memory")]


@pytest.mark.parametrize("damage", ["flip", "overwrite"])
def test_a_row_that_is_not_the_one_written_is_refused_in_one_sentence(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "memory"
    memories = FileStore(INITIAL, CLIENTS, path)
    memories.write([0, 1], rows(1.0, 2.0))
    facts = memories.save()
    if damage == "flip":
        data = bytearray(path.read_bytes())
        data[4096 + 5] ^= 1
        path.write_bytes(data)
    else:
        other = FileStore(INITIAL, CLIENTS, path)
        other.write([0, 1], rows(1.0, 3.0))
    again = FileStore(INITIAL, CLIENTS, path)
    again.load(*facts)
    assert same(again.read(0), row(1.0))
    with pytest.raises(InputError, match=r"memory of client 1 in .* is not what was written there"):
        again.read(1)


@pytest.mark.parametrize("keep", [None, 4096])
def test_a_file_that_is_missing_or_cut_short_is_refused_in_one_sentence(
    tmp_path: Path, keep: int | None
) -> None:
    path = tmp_path / "memory"
    memories = FileStore(INITIAL, CLIENTS, path)
    memories.write([0, 1], rows(1.0, 2.0))
    facts = memories.save()
    if keep is None:
        path.unlink()
    else:
        os.truncate(path, keep)
    with pytest.raises(InputError, match="missing or truncated"):
        FileStore(INITIAL, CLIENTS, path).load(*facts)


def test_a_temporary_file_is_gone_at_once_and_no_checkpoint_may_refer_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    memories = make_client_store(Mapped(), INITIAL, CLIENTS, CPU)
    memories.write([1], rows(3.0))
    assert list(tmp_path.iterdir()) == []
    assert same(memories.read(1), row(3.0))
    with pytest.raises(InputError, match="temporary file, which a checkpoint cannot refer to"):
        memories.save()


RESIDENT = """
import resource, sys
from pathlib import Path
import torch
from offbeat.data.client_store import FileStore

clients, path = int(sys.argv[1]), Path(sys.argv[2])
memories = FileStore(torch.zeros(65536), clients, path)
for client in range(clients):
    memories.write([client], torch.full((1, 65536), float(client)))
memories.save()
assert all(memories.read(client)[0] == client for client in range(clients))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_resident_memory_does_not_grow_with_the_number_of_clients(tmp_path: Path) -> None:
    peaks = []
    for clients in (10, 400):  # of 256 KiB each: 2.5 and 100 MiB
        words = [sys.executable, "-c", RESIDENT, str(clients), str(tmp_path / str(clients))]
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
        peaks.append(int(done.stdout) * (1 if sys.platform == "darwin" else 1024))
    assert (tmp_path / "400").stat().st_size == 400 * 2**18
    assert peaks[1] - peaks[0] < 40 * 2**20


METHOD = AdaMasFL(0.05, 0.1, 0.5)


@pytest.mark.parametrize("kind", [Sequential, Vectorised])
def test_a_run_gives_the_same_bits_wherever_its_memory_lives(
    kind: type[Sequential] | type[Vectorised], tmp_path: Path
) -> None:
    world = make_world()
    plain, *others = (
        play(
            METHOD,
            kind(world.problem, world.population, Exponential(1.0), dropout=Dropout(0.2), memory=home),
            Asynchronous(8),
        )
        for home in (InRam(), OnDevice(), Mapped(), Mapped(tmp_path), Anywhere())
    )
    assert (tmp_path / "memory").stat().st_size > 0
    for other in others:
        for left, right in zip(plain, other, strict=True):
            assert torch.equal(left.x, right.x)
            assert torch.equal(left.state.c, right.state.c)


@pytest.mark.parametrize("confirmed", [True, False])
def test_a_run_dropped_after_any_step_goes_on_from_its_last_checkpoint_with_the_same_bits(
    tmp_path: Path, confirmed: bool
) -> None:
    world = make_world()
    engine = Vectorised(world.problem, world.population, Exponential(1.0), memory=Mapped(tmp_path))
    path = tmp_path / "state"

    def live(resume: checkpoint.Checkpoint | None, end: int) -> torch.Tensor:
        """Up to a version, with a checkpoint at every third; then it is dropped."""
        shots = train(METHOD, engine, dispatch=Asynchronous(8), buffer=3, rounds=12, seed=SEED, resume=resume)
        for shot in shots:
            if shot.version % 3 == 0:
                checkpoint.save(path, shot.checkpoint())
                if confirmed:
                    shot.confirm()
            if shot.version == end:
                return shot.x
        raise AssertionError

    whole = play(METHOD, dataclasses.replace(engine, memory=InRam()), Asynchronous(8), rounds=12)
    for cut in (0, 2, 3, 7, 11):
        live(None, cut)
        assert torch.equal(live(checkpoint.load(path), 12), whole[-1].x)


@pytest.mark.parametrize("mapped", [True, False])
def test_a_checkpoint_is_resumed_where_its_memory_is_and_refused_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mapped: bool
) -> None:
    """By itself a run goes on as it began, whatever is free by then."""
    make = (Mapped(tmp_path), InRam()) if mapped else (InRam(), Mapped(tmp_path))
    memories, other = (make_client_store(home, INITIAL, CLIENTS, CPU) for home in make)
    assert (memories.mapped, other.mapped) == (mapped, not mapped)
    monkeypatch.setattr(client_store, "free_ram", lambda: 10**9 if mapped else 60 * CLIENTS)
    assert make_client_store(Anywhere(tmp_path), INITIAL, CLIENTS, CPU, mapped=mapped).mapped == mapped
    assert make_client_store(Anywhere(tmp_path), INITIAL, CLIENTS, CPU).mapped == (not mapped)
    with pytest.raises(InputError, match="this checkpoint keeps the clients' memory"):
        make_client_store(make[1], INITIAL, CLIENTS, CPU, mapped=mapped)


NEED = 1000 * 4000  # bytes of a thousand clients with a thousand floats


@pytest.mark.parametrize(
    ("home", "free", "sentence"),
    [
        (
            InRam(),
            NEED - 1,
            r"clients takes 3.81 MiB in RAM, but 3.81 MiB is free: use memory mapped",
        ),
        (OnDevice(), 0, r"takes 3.81 MiB on cpu, but 0 bytes is free"),
    ],
)
def test_what_does_not_fit_where_it_was_asked_to_live_is_refused(
    home: client_store.MemoryBackend, free: int, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, given_free in (("free_ram", lambda: free), ("free_device_memory", lambda device: free)):
        monkeypatch.setattr(client_store, name, given_free)
    with pytest.raises(InputError, match=sentence):
        make_client_store(home, torch.zeros(1000), 1000, CPU)


def test_a_disk_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 4096 * 999

    monkeypatch.setattr(client_store.shutil, "disk_usage", lambda path: Usage)
    home = Mapped(tmp_path / "deep" / "folder")
    with pytest.raises(InputError, match=r"1,000 clients takes 7.81 MiB on the disk, but 3.9 MiB is free"):
        make_client_store(home, torch.zeros(1000), 1000, CPU)
    assert list(tmp_path.iterdir()) == []
    assert make_client_store(home, torch.zeros(1000), 499, CPU).mapped  # two slots for each client
    (tmp_path / "memory").write_bytes(
        b"\1" * 4096 * 1002
    )  # what a run has written already it need not find again
    assert make_client_store(Mapped(tmp_path), torch.zeros(1000), 1000, CPU).mapped


@pytest.mark.parametrize(("free", "mapped"), [(2 * NEED, False), (2 * NEED - 1, True)])
def test_without_a_choice_ram_is_taken_up_to_half_of_what_is_free(
    free: int, mapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_store, "free_ram", lambda: free)
    assert make_client_store(Anywhere(tmp_path), torch.zeros(1000), 1000, CPU).mapped == mapped


@pytest.mark.parametrize(("free", "device"), [(2 * NEED, "meta"), (2 * NEED - 1, "cpu")])
def test_without_a_choice_the_device_that_computes_comes_first(
    free: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`meta` stands for a GPU."""
    monkeypatch.setattr(client_store, "free_device_memory", lambda device: free)
    monkeypatch.setattr(client_store, "free_ram", lambda: 2 * NEED)
    memories = make_client_store(Anywhere(), torch.zeros(1000), 1000, torch.device("meta"))
    memories.write([0], torch.zeros(1, 1000))
    assert memories.save()[1][0].device.type == device


def test_a_home_that_names_its_folder_keeps_it(tmp_path: Path) -> None:
    assert with_folder(Mapped(), tmp_path) == Mapped(tmp_path)
    assert with_folder(Mapped(Path("mine")), tmp_path) == Mapped(Path("mine"))
    assert with_folder(Anywhere(), tmp_path) == Anywhere(tmp_path)
    assert with_folder(InRam(), tmp_path) == InRam()


def test_an_unknown_home_is_refused() -> None:
    with pytest.raises(InputError, match="unknown memory 'mappd': did you mean mapped"):
        parse_memory_backend("mappd")


def test_no_more_ram_is_free_than_there_is() -> None:
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < free_ram() <= there


def test_a_system_that_does_not_say_what_is_free_counts_all_its_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_store, "_read_number", lambda path, start: None)
    assert free_ram() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


SMALL = Experiment.of(
    algorithm="adamasfl",
    clients=12,
    buffer=3,
    concurrency=5,
    local_steps=1,
    batch_size=4,
    rounds=14,
    eval_every=2,
    memory="mapped",
)


def test_a_mapped_run_on_the_command_line_that_crashes_twice_ends_as_one_in_ram(tmp_path: Path) -> None:
    words = [
        f"--{name}={getattr(SMALL, name.replace('-', '_'))}"
        for name in ("clients", "buffer", "concurrency", "local-steps", "batch-size", "rounds", "eval-every")
    ]
    assert main(["run", "adamasfl", *words, "--out", str(tmp_path / "ram"), "--memory", "ram"]) == 0
    out = tmp_path / "mapped"
    trial = build_run(SMALL)
    for begin, steps in ((RunFolder.begin, 6), (RunFolder.resume, 4)):
        with begin(out, SMALL.settings()) as folder:
            life = run_experiment(SMALL, trial, folder, save_every=4)
            for _ in range(steps):
                next(life)
            life.close()  # between two checkpoints
    assert main(["run", "--out", str(out), "--resume"]) == 0
    assert (out / "trace.jsonl").read_bytes() == (tmp_path / "ram" / "trace.jsonl").read_bytes()
    mine, other = (
        checkpoint.load(each / "checkpoint" / "state.safetensors") for each in (out, tmp_path / "ram")
    )
    assert torch.equal(mine.tensors["state.0"], other.tensors["state.0"])
    size = len(mine.tensors["state.0"])
    memories = FileStore(torch.zeros(size), SMALL.clients, out / "memory")
    session = mine.facts["session"]
    memories.load(
        session["clients"], [mine.tensors[f"session.memory.{n}"] for n in range(session["columns"])]
    )
    table = torch.stack([memories.read(client) for client in range(SMALL.clients)])
    assert torch.equal(table, other.tensors["session.memory.0"])
    sizes = [(each / "checkpoint" / "state.safetensors").stat().st_size for each in (out, tmp_path / "ram")]
    assert sizes[0] < sizes[1] - table.nbytes / 2  # it refers to the rows and has none itself


def test_a_run_whose_memory_does_not_fit_is_refused_before_its_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(client_store, "free_ram", lambda: 1000)
    out = tmp_path / "new"
    assert main(["run", "adamasfl", "--memory", "ram", "--out", str(out)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not out.exists()


def test_it_is_the_disk_of_the_runs_own_folder_that_must_have_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Usage:
        def __init__(self, path: Path) -> None:
            self.free = 0 if path == tmp_path else 10**12

    monkeypatch.setattr(client_store.shutil, "disk_usage", Usage)
    words = ["run", "adamasfl", "--memory", "mapped", "--out", str(tmp_path / "new")]
    assert main(words) == 2
    assert "on the disk, but 0 bytes is free" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
