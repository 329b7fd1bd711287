"""What Prometheus is told."""

from prometheus_client.parser import text_string_to_metric_families

from offbeat.core import Task
from offbeat.deploy.monitor.observer import Monitor
from offbeat.deploy.monitor.state import RunInfo
from offbeat.deploy.protocol.strict_json import Reason
from offbeat.training.runner import Progress


def samples(watch: Monitor) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(watch.metrics().decode())
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def make(epsilon: float | None = None) -> Monitor:
    return Monitor(
        RunInfo("run-1", "fedbuff", clients=4, buffer=2, rounds=10, concurrency=3, epsilon=epsilon)
    )


def test_every_reason_is_there_before_its_first_rejection() -> None:
    found = samples(make())
    assert {("offbeat_rejections_total", reason.value) for reason in Reason} <= found.keys()
    assert found["offbeat_rejections_total", "late"] == 0


def test_what_happens_is_counted() -> None:
    watch = make()
    for client in range(3):
        watch.tell("joined", node=100 + client, name=f"site-{client}", client=client)
        watch.tell("sent", **Task(client, 0, 0)._asdict(), bytes=1000)
    watch.stepped(Progress(0, 0.0, 0, 0.0, None))
    watch.tell("accepted", **Task(0, 0, 0)._asdict(), seconds=2.0, work=0.5, bytes=400)
    watch.tell("rejected", node=101, client=1, reason=Reason.INFINITE, sentence="leaf 0 has a NaN")
    watch.tell("lost", **Task(1, 0, 0)._asdict())
    watch.tell("aside", client=1, seconds=60.0)
    watch.tell("left", node=102, client=2)
    found = samples(watch)
    expected = {
        ("offbeat_tasks_sent_total",): 3,
        ("offbeat_sent_bytes_total",): 3000,
        ("offbeat_uploads_accepted_total",): 1,
        ("offbeat_received_bytes_total",): 400,
        ("offbeat_rejections_total", "infinite"): 1,
        ("offbeat_tasks_lost_total",): 1,
        ("offbeat_tasks_in_flight",): 1,
        ("offbeat_tasks_in_flight_asked",): 3,
        ("offbeat_nodes_present",): 2,
        ("offbeat_clients_known",): 3,
        ("offbeat_clients_aside",): 1,
        ("offbeat_buffer_waiting",): 1,
        ("offbeat_buffer_size",): 2,
        ("offbeat_task_seconds_sum",): 2,
        ("offbeat_work_seconds_sum",): 0.5,
    }
    assert {key: found[key] for key in expected} == expected


def test_a_step_shows_version_scores_staleness_and_checkpoint() -> None:
    watch = make()
    record = {"accuracy": 0.75, "loss": 0.5, "elapsed": 3.0}
    watch.stepped(Progress(7, 1.0, 2, 1.5, record, ages=(0, 3)))
    watch.tell("saved", version=7)
    found = samples(watch)
    expected = {
        ("offbeat_version",): 7,
        ("offbeat_versions_asked",): 10,
        ("offbeat_metric", "accuracy"): 0.75,
        ("offbeat_metric", "loss"): 0.5,
        ("offbeat_staleness_versions_bucket", "0.0"): 1,
        ("offbeat_staleness_versions_bucket", "3.0"): 2,
        ("offbeat_checkpoints_total",): 1,
    }
    assert {key: found[key] for key in expected} == expected


def test_privacy_that_nobody_counts_is_not_shown_as_zero() -> None:
    watch = make()
    assert ("offbeat_epsilon_spent",) not in samples(watch)
    watch = make(epsilon=8.0)
    watch.tell("spent", epsilon=1.5)
    found = samples(watch)
    assert (found["offbeat_epsilon_spent",], found["offbeat_epsilon_budget",]) == (1.5, 8.0)


def test_privacy_is_told_with_the_version_up_to_which_it_was_counted() -> None:
    watch = make(epsilon=8.0)
    for version, epsilon in enumerate((0.0, 0.5, None, None)):
        watch.stepped(Progress(version, 1.0, 0, 0.0, {"epsilon": epsilon}))
    assert watch.status()["privacy"] | {"delta": None} == {
        "spent": 0.5,
        "version": 1,
        "budget": 8.0,
        "delta": None,
    }
    found = samples(watch)
    assert (found["offbeat_epsilon_spent",], found["offbeat_epsilon_version",]) == (0.5, 1)
    assert ("offbeat_epsilon_version",) not in samples(make())


def test_two_runs_in_one_process_do_not_share_counts() -> None:
    one, other = make(), make()
    one.tell("saved", version=1)
    assert samples(other)["offbeat_checkpoints_total",] == 0
