"""Secure sums whose clients hide uploads by themselves: the same model as with all parties in one process."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offbeat import Asynchronous, FedOpt, InputError, Problem, Sequential, Setting, Synchronous, build, trees
from offbeat.aggregate.mean import AggregationContext, Aggregator, Mean, SecureEncoding
from offbeat.aggregate.private import Private
from offbeat.aggregate.secure import RemoteSecure, RemoteSecureSum, Secure
from offbeat.aggregate.uploads import SecretShares, probe_upload
from offbeat.core import AnyAlgorithm, Cohort, SavedState, Task
from offbeat.deploy.helper.server import HelperService
from offbeat.deploy.server.validation import secure_validator
from offbeat.deploy.site.secure_encode import read_secure_request, secure_encode
from offbeat.engines.engine import ClientUpdates, SecureEncodingSession, Session
from offbeat.privacy.mechanism import AdaptiveClipping
from offbeat.privacy.secure.encoding import NO_MESSAGE
from offbeat.privacy.secure.terms import BindingError, ReplayError, ShortBatchError
from offbeat.schedule.delays import Exponential
from offbeat.schedule.participation import Participation
from offbeat.schedule.rng import Rng
from offbeat.schedule.staleness import Equal, Polynomial
from offbeat.training.loop import Snapshot, describe_cohort, train
from secure_world import Nearby, new_desk
from worlds import CLASSES, FEATURES, each, make_world

SEED = 4
MA = build("ma-fedavgm", Setting(5, 3, 6), {"local_lr": 0.1})


@dataclass
class Hidden:
    """The simulator's engine, with uploads that leave clients as they would leave sites."""

    inner: Sequential
    sent: dict[Task, list[torch.Tensor]] = field(default_factory=dict)  # what a server keeps on disk
    spoil: Callable[[Task, list[torch.Tensor]], list[torch.Tensor]] = lambda task, leaves: leaves

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def open(self, algorithm: AnyAlgorithm, seed: int, source: Rng) -> "HiddenSession":
        return HiddenSession(self.inner.open(algorithm, seed, source), self, seed)


class HiddenSession:
    def __init__(self, inner: Session, engine: Hidden, seed: int) -> None:
        self._inner, self._engine, self._seed = inner, engine, seed
        self._told: dict[int, SecureEncoding] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def set_secure_encoding(self, encoding: Callable[[], SecureEncoding | None], private: bool) -> None:
        assert private
        self._hiding = encoding

    def publish(self, version: int, *others: Any) -> None:
        hiding = self._hiding()
        assert hiding is not None
        facts = json.loads(json.dumps(hiding.facts, allow_nan=False))  # as a note would have it
        self._told[version] = hiding._replace(facts=facts)
        self._inner.publish(version, *others)

    def gather(self, tasks: Sequence[Task], version: int) -> ClientUpdates:
        plain = self._inner.gather(tasks, version)
        sent = self._engine.sent
        for row, task in enumerate(tasks):
            facts = self._told.get(task.version, self._told[version]).facts
            upload = trees.map(lambda leaf, row=row: leaf[row], plain.uploads)
            if task not in sent:
                request = read_secure_request(facts, facts["key"], 2)
                leaves = secure_encode(upload, {}, task, request, self._seed, None, {}, NO_MESSAGE)
                sent[task] = self._engine.spoil(task, leaves)
        intake = secure_validator(self._told[version])
        return intake.join((sent[task] for task in tasks), len(tasks))


@pytest.fixture
def desk(tmp_path: Path) -> Any:
    made = new_desk(tmp_path / "store")
    yield made
    made.close()


def engine(dtype: torch.dtype = torch.float64) -> Sequential:
    """Softmax regression of nine clients, from zero."""
    world = make_world(clients=9)
    module = nn.Linear(FEATURES, CLASSES, dtype=dtype)
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return Sequential(Problem(module, each), world.population.to(dtype=dtype), Exponential(1.0))


def distant(desk: HelperService, secure: Secure, run: bytes = b"run") -> RemoteSecure:
    return RemoteSecure(secure, run, Nearby(desk))


OPTIONS: dict[str, Any] = {"dispatch": Asynchronous(7), "buffer": 5, "rounds": 6, "seed": SEED}


def run(algorithm: AnyAlgorithm, where: Any, aggregate: Aggregator, **others: Any) -> list[Snapshot]:
    return list(train(algorithm, where, aggregate=aggregate, **OPTIONS | others))


def private(algorithm: AnyAlgorithm, secure: Any, **others: Any) -> Private:
    settings = {
        "participation": Participation(max_participations=20, min_separation=1),
        "noise_seed": 1,
    } | others
    return Private.of(algorithm, 0.4, 0.3, 1e-5, summation=secure, **settings)


CASES: dict[str, tuple[AnyAlgorithm, Callable[[AnyAlgorithm, Any], Aggregator], Secure, dict[str, Any]]] = {
    "a mean": (FedOpt(0.1, 1.0), lambda a, s: Mean(s), Secure(3), {}),
    "weights that fade": (FedOpt(0.1, 1.0), lambda a, s: Mean(s), Secure(3), {"weights": Polynomial(0.5)}),
    "rounded at random": (FedOpt(0.1, 1.0), lambda a, s: Mean(s), Secure(3, 9, stochastic=True), {}),
    "a start of everybody": (
        build("adamasfl", Setting(5, 3, 6), {}),
        lambda a, s: Mean(s),
        Secure(3),
        {},
    ),
    "memory": (build("scaffold", Setting(5, 3, 6), {"local_lr": 0.1}), lambda a, s: Mean(s), Secure(3), {}),
    "private momentum approximation": (MA, private, Secure(3), {}),
    "private with weights": (MA, private, Secure(3, stochastic=True), {"weights": Polynomial(0.5)}),
    "private with bounds that move": (
        FedOpt(0.1, 1.0),
        lambda a, s: private(a, s, adaptive=AdaptiveClipping(0.5)),
        Secure(3),
        {"dispatch": Synchronous(5)},
    ),
    "private without noise": (
        FedOpt(0.1, 1.0),
        lambda a, s: Private.of(a, math.inf, 0.0, 1e-5, summation=s, participation=Participation()),
        Secure(3),
        {},
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_the_model_is_bit_for_bit_that_of_sums_in_one_process(
    case: str, dtype: torch.dtype, desk: HelperService
) -> None:
    algorithm, aggregate, secure, others = CASES[case]
    here = run(algorithm, engine(dtype), aggregate(algorithm, secure), **others)
    there = run(algorithm, Hidden(engine(dtype)), aggregate(algorithm, distant(desk, secure)), **others)
    assert len(here) == len(there) > 5
    for left, right in zip(here, there, strict=True):
        assert torch.equal(left.x, right.x)
        assert left.x.dtype == dtype
    assert not torch.equal(here[0].x, here[-1].x)


def test_a_run_that_is_resumed_sums_what_it_had_kept_again_and_nothing_else(desk: HelperService) -> None:
    """The same requests, since uploads are kept with their seals; with other seals they are refused."""
    aggregate = Mean(distant(desk, Secure(3)))
    first = Hidden(engine())
    saved, whole = None, []
    for shot in train(FedOpt(0.1, 1.0), first, aggregate=aggregate, **OPTIONS):
        whole.append(shot)
        saved = shot.checkpoint() if shot.version == 3 else saved
    assert saved is not None
    assert set(json.loads(json.dumps(saved.facts))["aggregate"]) == {"run", "length", "key", "sums"}
    rest = run(FedOpt(0.1, 1.0), Hidden(engine(), first.sent), aggregate, resume=saved)
    assert [shot.version for shot in rest] == [4, 5, 6]
    assert torch.equal(rest[-1].x, whole[-1].x)
    with pytest.raises(ReplayError, match="all of this batch was added before"):
        run(FedOpt(0.1, 1.0), Hidden(engine()), aggregate, resume=saved)
    other = Mean(distant(desk, Secure(3), b"another"))
    with pytest.raises(InputError, match="secure aggregation is of another run"):
        run(FedOpt(0.1, 1.0), Hidden(engine()), other, resume=saved)


def test_a_report_that_cannot_be_added_counts_as_zeros(
    desk: HelperService, caplog: pytest.LogCaptureFixture
) -> None:
    def spoil(task: Task, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        bad = task.client == 2
        return [leaves[0], torch.zeros_like(leaves[1]), leaves[2]] if bad else leaves

    shots = run(FedOpt(0.1, 1.0), Hidden(engine(), spoil=spoil), Mean(distant(desk, Secure(2))))
    assert torch.isfinite(shots[-1].x).all()
    assert "visit 0 of client 2 does not open" in caplog.text


def test_too_few_reports_that_can_be_added_are_refused(desk: HelperService) -> None:
    def spoil(task: Task, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        return [leaves[0], torch.zeros_like(leaves[1]), leaves[2]] if task.client < 5 else leaves

    with pytest.raises(ShortBatchError, match="distinct clients"):
        run(FedOpt(0.1, 1.0), Hidden(engine(), spoil=spoil), Mean(distant(desk, Secure(5))))


# --- one sum


def opening(algorithm: AnyAlgorithm = FedOpt(0.1, 1.0), **others: Any) -> AggregationContext:
    base = AggregationContext(algorithm, torch.zeros(3), Asynchronous(5), Equal(), 4, 50, 5, math.inf, 3)
    return base._replace(**others)


def opened(desk: HelperService, secure: Secure = Secure(2), **others: Any) -> RemoteSecureSum:
    return distant(desk, secure).open(opening(**others))


def test_clients_are_told_all_they_need_as_json(desk: HelperService) -> None:
    hiding = opened(desk, weights=Polynomial(0.5)).secure_encoding()
    assert json.loads(json.dumps(hiding.facts)) == {
        "run": b"run".hex(),
        "length": 3,
        "most": 4,
        "minimum": 2,
        "bits": 16,
        "weight_bits": 8,
        "weights": "polynomial:0.5",
        "stochastic": False,
        "key": desk.info.key.hex(),
        "signed": False,
        "bounds": None,
        "moving": [],
        "noise": None,
    }
    noised = private(MA, distant(desk, Secure(2))).open(opening(MA))
    facts = noised.secure_encoding().facts  # type: ignore[union-attr]
    assert facts["bounds"] == {"delta": 0.4, "stamp": 1.0}
    assert Mean(Secure(2)).open(opening()).secure_encoding() is None
    assert Mean().open(opening()).secure_encoding() is None


def test_reports_that_were_clipped_to_other_bounds_are_not_summed(desk: HelperService) -> None:
    """A server could else tell all sites but one to send next to nothing."""
    noised = private(FedOpt(0.1, 1.0), distant(desk, Secure(2))).open(opening())
    hiding = noised.secure_encoding()
    assert hiding is not None
    those = [Task(client, 0, 0) for client in range(4)]
    told = [hiding.facts] + [hiding.facts | {"bounds": {"delta": 1e-9}}] * 3
    upload = trees.map(torch.ones_like, probe_upload(FedOpt(0.1, 1.0), torch.zeros(3), 0))
    sent = [
        secure_encode(upload, {}, task, read_secure_request(facts, facts["key"], 2), 0, None, {}, NO_MESSAGE)
        for task, facts in zip(those, told, strict=True)
    ]
    for task, (_, sealed, _), facts in zip(those, sent, told, strict=True):
        seed = sealed.numpy().tobytes()
        if facts is hiding.facts:
            hiding.examine(task, seed, b"")
            continue
        with pytest.raises(BindingError, match="does not open"):
            hiding.examine(task, seed, b"")
    with pytest.raises(ShortBatchError, match="at least 2 distinct clients, not 1"):
        noised.collect(
            secure_validator(hiding).join(sent, len(sent)).uploads,
            those,
            describe_cohort(those, 0, 50, Equal()),
        )


def test_a_helper_that_wants_more_clients_is_not_asked(tmp_path: Path) -> None:
    desk = new_desk(tmp_path / "strict", minimum=3)
    with pytest.raises(InputError, match="at least 3 clients, and these sums may be of 2: raise"):
        opened(desk).secure_encoding()
    opened(desk, Secure(3)).secure_encoding()
    desk.close()


def test_what_is_not_hidden_is_not_summed(desk: HelperService) -> None:
    those = tuple(Task(client, 0, 0) for client in range(4))
    with pytest.raises(InputError, match="are not encoded for secure aggregation"):
        opened(desk).total((torch.zeros(4, 3),), those, describe_cohort(those, 0, 50, Equal()))


@pytest.mark.parametrize(
    ("others", "sentence"),
    [
        ({"buffer": 1}, "secure aggregation needs 2 distinct clients"),
        ({"weights": lambda staleness: 1.0}, "weights that have a name"),
        ({"answers": 1}, "stale updates would have an earlier adaptive bound"),
        ({"answers": 1, "dispatch": Synchronous(5)}, "an earlier adaptive bound"),
        ({"buffer": 2, "weights": Polynomial(1.0)}, "different staleness have different weights"),
        ({"buffer": 2, "weights": Polynomial(0.5)}, "different staleness have different weights"),
        ({"buffer": 2, "weights": Polynomial(1.0), "max_staleness": 1}, "different staleness"),
    ],
)
def test_a_run_that_cannot_be_summed_so_is_refused(
    desk: HelperService, others: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        opened(desk, **others)


@pytest.mark.parametrize(
    "others",
    [
        {"buffer": 3, "weights": Polynomial(1.0)},
        {"buffer": 3, "weights": Polynomial(0.5)},
        {"buffer": 2, "weights": Polynomial(1.0), "max_staleness": 0},
        {"buffer": 2, "weights": Polynomial(1.0), "dispatch": Synchronous(2)},
    ],
)
def test_weights_may_fade_where_enough_clients_still_count(
    desk: HelperService, others: dict[str, Any]
) -> None:
    opened(desk, **others)


@pytest.mark.parametrize("others", [{"dispatch": Synchronous(4)}, {"max_staleness": 0}])
def test_bounds_may_move_where_nobody_is_stale(desk: HelperService, others: dict[str, Any]) -> None:
    opened(desk, answers=1, **others)


def test_uploads_of_two_forms_cannot_be_summed_so(desk: HelperService) -> None:
    @dataclass(frozen=True)
    class Odd:
        inner: FedOpt

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def local(self, message: Any, memory: Any, batches: Any, visit: Any, grad: Any) -> Any:
            upload, memory = self.inner.local(message, memory, batches, visit, grad)
            return (upload, upload) if int(visit.version) % 2 else upload, memory

    with pytest.raises(InputError, match="uploads of one form, and Odd has 2"):
        opened(desk, algorithm=Odd(FedOpt(0.1, 1.0)))


def test_stale_shares_under_a_bound_that_moves_are_refused(desk: HelperService) -> None:
    """Whatever let them in: noise for one bound would not hide what was clipped to another."""
    aggregation = private(FedOpt(0.1, 1.0), distant(desk, Secure(2)), adaptive=AdaptiveClipping(0.5)).open(
        opening(max_staleness=0)
    )
    shares = SecretShares(torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, 64, dtype=torch.uint8))
    cohort = Cohort(1, 50, (0, 1), (1.0, 1.0))
    with pytest.raises(InputError, match="knew other bounds"):
        aggregation.collect(shares, [Task(0, 1, 0), Task(1, 0, 0)], cohort)


def test_a_helper_whose_key_changed_is_not_asked(desk: HelperService) -> None:
    summing = opened(desk)
    summing.secure_encoding()
    saved = summing.save()
    again = opened(desk)
    again.load(SavedState(json.loads(json.dumps(saved.facts)), {}))
    assert again.save() == saved
    again.secure_encoding()
    other = opened(desk)
    other.load(SavedState(saved.facts | {"key": "00" * 32}, {}))
    with pytest.raises(InputError, match="the helper has another key than before"):
        other.secure_encoding()


def test_a_helper_that_asks_for_no_signatures_is_refused_where_they_are_wanted(desk: HelperService) -> None:
    summing = replace(distant(desk, Secure(2)), signed=True).open(opening())
    with pytest.raises(InputError, match="does not ask for signatures"):
        summing.secure_encoding()


def test_what_is_written_to_checkpoints_has_no_secrets_and_no_addresses(desk: HelperService) -> None:
    assert repr(distant(desk, Secure(2))) == f"RemoteSecure(secure={Secure(2)!r}, signed=False)"


def test_only_a_session_that_can_hide_is_told_how(desk: HelperService) -> None:
    source = Asynchronous(5).source(0)
    assert not isinstance(engine().open(FedOpt(0.1, 1.0), 0, source), SecureEncodingSession)
    assert isinstance(Hidden(engine()).open(FedOpt(0.1, 1.0), 0, source), SecureEncodingSession)
