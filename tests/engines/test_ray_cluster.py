"""Client work on Ray actors: the sequential engine's results, whoever dies on the way."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lasting import METHODS, Lasting, identical, ragged, same, steps
from offbeat import Asynchronous, InputError
from offbeat.cli import main
from offbeat.engines import ray_cluster
from offbeat.engines.execution import Serial
from offbeat.engines.ray_cluster import RayCluster, RayPool
from offbeat.engines.worker_pool import pack_worker
from worlds import make_world, play

ray = pytest.importorskip("ray", reason="Ray is an extra, and not installed")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One for all tests: its start takes seconds."""
    assert ray_cluster.connect(None, 3)
    yield
    ray_cluster.disconnect(ray)


@pytest.fixture(scope="module")
def lasting(cluster: None) -> Iterator[Lasting]:
    world = ragged()
    pool = RayPool(pack_worker(world.problem, world.population, Serial()), 2, None, 0.0, 2)
    yield Lasting(world, pool)
    pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_cluster_gives_the_sequential_trajectory_and_repeats_it_to_the_bit(
    method: str, lasting: Lasting
) -> None:
    one = play(METHODS[method], lasting.engine, Asynchronous(5))
    lasting.ahead = 6
    first, second = (play(METHODS[method], lasting, Asynchronous(5)) for _ in range(2))
    same(one, first)
    identical(first, second)


@pytest.mark.slow
def test_workers_that_are_killed_again_and_again_change_nothing(lasting: Lasting) -> None:
    lasting.ahead = 0
    whole = play(METHODS["adamasfl"], lasting, Asynchronous(5))
    chance = random.Random(1)
    killed = set()
    disturbed = []
    for shot in steps(METHODS["adamasfl"], lasting, rounds=8):
        disturbed.append(shot)
        if shot.version % 3 == 0:
            victims = lasting.pool.process_ids()[: 1 + shot.version % 2]  # one, or both
            killed |= set(victims)
            timer = threading.Timer(chance.uniform(0, 0.02), lambda each=victims: [*map(kill, each)])
            timer.start()
            if shot.version == 6:
                timer.join()
    identical(whole, disturbed)
    assert len(killed) == 4
    assert not killed & set(lasting.pool.process_ids())


def kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)


@pytest.mark.slow
def test_a_run_leaves_a_cluster_that_it_did_not_start(cluster: None) -> None:
    world = make_world()
    engine = RayCluster(world.problem, world.population, workers=1)
    assert len(play(METHODS["fedavg"], engine, Asynchronous(5), rounds=1)) == 2
    assert ray.is_initialized()


@pytest.mark.slow
def test_more_workers_than_there_is_room_for_are_refused(cluster: None) -> None:
    world = make_world()
    for asked, gpus, said in ((100, 0.0, "a core each, not for 100"), (None, 1.0, "1 GPU and a core each")):
        engine = RayCluster(world.problem, world.population, workers=asked, gpus=gpus)
        with pytest.raises(InputError, match=rf"the cluster has room for \d+ workers with {said}"):
            play(METHODS["fedavg"], engine, Asynchronous(5))


@pytest.mark.slow
def test_a_cluster_that_runs_answers(cluster: None) -> None:
    ray_cluster.check_cluster(ray.get_runtime_context().gcs_address)


def test_numbers_that_cannot_be_are_refused() -> None:
    world = make_world()
    with pytest.raises(InputError, match="the number of workers is 0: give at least 1"):
        RayCluster(world.problem, world.population, workers=0)
    with pytest.raises(InputError, match=r"the number of GPUs of a worker is -1: give at least 0"):
        RayCluster(world.problem, world.population, gpus=-1)


def silent(line: socket.socket) -> None:
    line.recv(100)


def rude(line: socket.socket) -> None:
    line.recv(100)
    line.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.mark.parametrize("manner", [silent, rude])
def test_a_server_that_is_no_cluster_is_refused(
    manner: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "_CONNECT_TIMEOUT", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            line, _ = server.accept()
            with line, contextlib.suppress(ConnectionError):
                manner(line)
                line.recv(100)  # until the other side has had enough

        thread = threading.Thread(target=serve)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(InputError, match=f"no Ray cluster answers at {address}: start one there"):
            ray_cluster.check_cluster(address)
        thread.join()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        (
            "127.0.0.1:1",
            "no Ray cluster answers at 127.0.0.1:1: start one there, or leave out --ray-address.",
        ),
        ("nowhere", "'nowhere' is not the address of a cluster: give HOST:PORT of its head, or auto."),
        (
            "ray://here:1",
            "'ray://here:1' is not the address of a cluster: give HOST:PORT of its head, or auto.",
        ),
    ],
)
def test_an_address_where_no_cluster_is_gives_one_sentence_and_leaves_nothing(
    address: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["run", "--engine", "ray", "--ray-address", address, "--out", str(tmp_path / "run")]
    assert main(words) == 2
    assert capsys.readouterr().err == f"offbeat: {said}\n"
    assert not (tmp_path / "run").exists()


def test_without_ray_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["run", "--engine", "ray", "--out", str(tmp_path / "run")]) == 2
    assert "needs the package ray: install it with pip install 'offbeat[ray]'" in capsys.readouterr().err


def test_a_process_of_rays_that_dies_slowly_is_no_warning_of_ours() -> None:
    class Closing:
        def __init__(self, word: str) -> None:
            self.word = word

        def shutdown(self) -> None:
            warnings.warn(self.word, ResourceWarning, stacklevel=1)

    ray_cluster.disconnect(Closing("subprocess 12 is still running"))
    with pytest.raises(ResourceWarning, match="unclosed"):
        ray_cluster.disconnect(Closing("unclosed socket"))


@pytest.mark.slow
def test_the_command_line_starts_a_cluster_of_its_own_and_leaves_no_trace_at_home(tmp_path: Path) -> None:
    words = "run fedavg --clients 12 --buffer 3 --rounds 3 --local-steps 1 --engine ray --workers 2 --json"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    home = tmp_path / "home"
    home.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "offbeat", *words.split(), "--out", str(tmp_path / "run")],
        env=environment | {"HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["finished"]
    assert done.stderr == ""
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["resolved"]["engine"] == "ray"
    assert not list(home.rglob("*auth*"))
