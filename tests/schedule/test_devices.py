"""Devices: time by steps and bytes, links that come and go, and availability that depends on data."""

import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from offbeat import Asynchronous, ClientCycle, Epochs, Sequential, Setting, Steps, build
from offbeat.cli import main
from offbeat.errors import InputError
from offbeat.schedule.availability import RecordedLinks, parse_availability
from offbeat.schedule.delays import parse_delay
from offbeat.schedule.devices import DeviceProfile, Devices, Phones, TaskWork, for_work
from offbeat.schedule.rng import KeyedRng
from offbeat.training.experiment import Experiment
from offbeat.training.task import named_task
from worlds import make_world, play

WORK = TaskWork(lambda client: 5, 1e6, 2e6)


def test_the_time_of_a_task_follows_from_steps_and_bytes() -> None:
    devices = Devices([DeviceProfile(0.1, 1e6, 5e5)])
    seconds = for_work(devices, WORK).bind(KeyedRng(0), 10)
    assert seconds(3, 0, 0.5) == pytest.approx(1e6 / 1e6 + 5 * 0.1 + 2e6 / 5e5)


def test_jitter_has_median_one_and_its_own_spread() -> None:
    bound = for_work(Devices([DeviceProfile(1.0, 1e9, 1e9)], 0.5), WORK).bind(KeyedRng(0), 10)
    middle = bound(0, 0, 0.5)
    assert middle == pytest.approx(5.003)
    assert bound(0, 0, 0.8413) / middle == pytest.approx(np.exp(0.5), rel=1e-3)


def test_clients_have_kinds_of_devices_by_their_shares() -> None:
    devices = Devices([DeviceProfile(1.0, 1e9, 1e9, 3.0), DeviceProfile(10.0, 1e9, 1e9, 1.0)])
    bound = for_work(devices, WORK).bind(KeyedRng(0), 4000)
    times = np.array([bound(client, 0, 0.5) for client in range(4000)])
    assert set(times.round()) == {5.0, 50.0}
    assert 0.72 < (times < 10).mean() < 0.78
    assert bound(17, 0, 0.5) == bound(17, 9, 0.1)  # without jitter, at every visit


def test_a_file_has_devices(tmp_path: Path) -> None:
    path = tmp_path / "devices.csv"
    path.write_text("download,upload,seconds_per_step\n1e6,5e5,0.1\n")
    bound = for_work(parse_delay(f"devices:{path}"), WORK).bind(KeyedRng(0), 10)
    assert bound(0, 0, 0.5) == pytest.approx(5.5)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "line 1: a file of devices begins with its columns"),
        ("a,b\n1,2\n", "line 1: a file of devices begins with its columns"),
        ("seconds_per_step,download,upload\n", "there is no device"),
        ("seconds_per_step,download,upload\n1,2\n", "line 2: '1,2' is not a device: write 3 numbers."),
        ("seconds_per_step,download,upload\n1,0,2\n", "the download speed of a device is 0.0"),
    ],
)
def test_a_bad_file_of_devices_is_refused_in_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "devices.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=sentence.replace("(", "[(]")):
        for_work(parse_delay(f"devices:{path}"), WORK)


def test_more_steps_take_longer_in_a_run_and_epochs_by_the_size_of_the_client() -> None:
    def times(work: Steps | Epochs) -> dict[int, float]:
        world = make_world(work=work)
        engine = Sequential(world.problem, world.population, Devices([DeviceProfile(1.0, 1e9, 1e9)]))
        shots = play(build("fedbuff", Setting(3, 3, 8), {}), engine, Asynchronous(8))
        return {
            task.client: arrived - started
            for shot in shots[1:]
            if shot.filled
            for task, started, arrived in zip(
                shot.filled.tasks, shot.filled.started, shot.filled.arrived, strict=True
            )
        }

    assert all(seconds == pytest.approx(3, abs=1e-3) for seconds in times(Steps(3, 4)).values())
    sizes = make_world().population
    for client, seconds in times(Epochs(1, 4)).items():
        assert seconds == pytest.approx(-(-sizes.size(client) // 4), abs=1e-3)


def test_a_schedule_without_a_model_refuses_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "--delays", "phones:0.1"]) == 2
    assert "follows from its steps and bytes" in capsys.readouterr().err
    assert str(parse_delay("phones:0.1")) == "phones:0.1"
    assert str(Phones(0.1, 0.5)) == "phones:0.1:0.5"


def write_links(folder: Path) -> None:
    """A link with an outage from 2 s to 6 s of 10 s, and a compressed one without, in Mahimahi's format."""
    folder.mkdir()
    times = [*range(0, 2001, 100), *range(6000, 10001, 100)]
    (folder / "driving.down").write_text("\n".join(map(str, times)) + "\n")
    with lzma.open(folder / "still.down.xz", "wt") as file:
        file.write("\n".join(map(str, range(0, 10001, 500))) + "\n")


def test_clients_are_away_while_their_recorded_link_delivers_nothing(tmp_path: Path) -> None:
    write_links(tmp_path / "links")
    one = RecordedLinks(str(tmp_path / "links" / "driving.down")).bind(0)
    there = [one(client, now) <= now for client in range(200) for now in (0.0, 3.3, 17.1)]
    assert 0.5 < np.mean(there) < 0.7  # six of ten seconds
    for client in range(50):
        back = one(client, 1.0)
        assert back < 5.0 + 1e-9
        assert one(client, back + 1e-9) <= back + 1e-9
        assert one(client, 1.0) == pytest.approx(one(client, 11.0) - 10.0)  # it repeats
    both = RecordedLinks(str(tmp_path / "links")).bind(0)
    mixed = [both(client, now) <= now for client in range(200) for now in (0.0, 3.3, 17.1)]
    assert 0.72 < np.mean(mixed) < 0.88


def test_a_second_without_a_packet_is_an_outage_and_less_is_not(tmp_path: Path) -> None:
    for gap, away in ((999, False), (1000, True)):
        file = tmp_path / f"{gap}.down"
        file.write_text("\n".join(map(str, [0, 100, 100 + gap, 1300])) + "\n")
        link = RecordedLinks(str(file)).bind(0)
        assert any(link(client, 0.0) > 0.0 for client in range(100)) == away


def test_a_run_with_recorded_links_repeats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_links(tmp_path / "links")
    words = ["schedule", "--availability", f"recorded:{tmp_path / 'links'}", "--rounds", "50", "--json"]
    assert main(words) == 0
    first = capsys.readouterr().out
    assert main(words) == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("one\ntwo\n", "each line must be a time in milliseconds"),
        ("", "its times must grow from 0"),
        ("5\n3\n", "its times must grow from 0"),
        (None, "cannot read the recorded link"),
    ],
)
def test_a_bad_link_is_refused_in_one_sentence(tmp_path: Path, text: str | None, sentence: str) -> None:
    path = tmp_path / "link"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=sentence):
        parse_availability(f"recorded:{path}").bind(0)


def test_a_client_is_there_for_its_own_share() -> None:
    back = ClientCycle(10.0, [0.2, 1.0]).bind(0)
    moments = np.linspace(0, 100, 2000)
    shares = [np.mean([back(client, now) <= now for now in moments]) for client in (0, 1)]
    assert shares[0] == pytest.approx(0.2, abs=0.01)
    assert shares[1] == 1.0
    by_function = ClientCycle(10.0, lambda client: 0.2 if client == 0 else 1.0).bind(0)
    assert all(by_function(0, now) == back(0, now) for now in moments)
    with pytest.raises(InputError, match="give a number above 0 and at most 1"):
        ClientCycle(10.0, [0.0])
    with pytest.raises(InputError, match="client 2 has none"):
        back(2, 0.0)


@pytest.mark.parametrize("spec", ["by-examples:50", "by-classes:50:0.05"])
def test_clients_with_more_data_take_part_more_often(spec: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["run", "fedavg", "--clients", "30", "--rounds", "150", "--local-steps", "1", "--batch-size", "1"]
    words += ["--partition", "dirichlet:0.1", "--buffer", "3", "--availability", spec, "--out", str(out)]
    assert main(words) == 0
    visits = np.zeros(30)
    for line in (out / "trace.jsonl").read_text().splitlines():
        for client, *_ in json.loads(line)["tasks"]:
            visits[client] += 1
    experiment = Experiment.from_settings(json.loads((out / "settings.json").read_text()))
    task = named_task(experiment)
    measure = spec.partition(":")[0].removeprefix("by-")
    weights = np.array(task.client_weights(task.population(experiment, Steps(1, 1)), measure))
    order = np.argsort(weights)
    assert visits[order[-10:]].mean() > 1.3 * visits[order[:10]].mean()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--availability", "by-examples:50"],
            "might depend on other clients, which timed releases do not cover",
        ),
        (["--deadline", "quantile:0.9"], "lets other clients decide whether a client is late"),
        (["--delays", "phones:0.1", "--local-epochs", "1"], "tells how many examples a client has"),
    ],
)
def test_amplified_privacy_refuses_what_depends_on_data(
    options: list[str], sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    private = [
        "run",
        "fedbuff",
        "--dispatch",
        "allocation",
        "--release-period",
        "10",
        "--clip",
        "1",
    ]
    private += ["--noise", "1", "--delta", "1e-5", "--out", str(tmp_path / "no")]
    assert main([*private, *options]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
