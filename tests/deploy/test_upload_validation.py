import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor, nn

from offbeat import CATALOGUE, AdaMasFL, FedOpt, Setting, build, trees
from offbeat.algorithms.adamasfl import Upload
from offbeat.algorithms.mime import GradientUpload, UpdateUpload
from offbeat.core import AnyAlgorithm, Task, Visit, traits_of
from offbeat.deploy.protocol.messages import UploadMessage, encode_message, pack, specs_of
from offbeat.deploy.protocol.strict_json import Reason, Rejected
from offbeat.deploy.server.validation import plain_validator, validate_upload
from offbeat.engines.local import ClientMemory, SequentialExecutor, TaskResults, TaskStart
from worlds import CLASSES, FEATURES, SEED, World, make_world

METHOD = AdaMasFL(0.05, 0.1, 0.5)
TASK = Task(3, 5, 2)
RUN = "run-1"


def counting_world() -> World:
    """Its module keeps running statistics, one of them a whole number."""
    torch.manual_seed(0)
    return make_world(module=nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.BatchNorm1d(CLASSES)).double())


def work(world: World, algorithm: AnyAlgorithm, tasks: list[Task]) -> TaskResults:
    x, statistics = world.problem.initial()
    starts = [
        TaskStart(
            algorithm.broadcast(algorithm.init(x), task.version),
            statistics,
            ClientMemory.initial(algorithm, world.problem),
            Visit(torch.tensor(task.version), torch.tensor(0)),
        )
        for task in tasks
    ]
    return SequentialExecutor(world.problem, world.population)(algorithm, tasks, starts, SEED)


def row(results: TaskResults, number: int) -> list[Tensor]:
    """The leaves that one task's site sends."""
    return [leaf[number] for leaf in trees.leaves((results.uploads, results.statistics))]


def answer(leaves: list[Tensor], **changed: Any) -> tuple[str, bytes]:
    note = structs.replace(UploadMessage(RUN, TASK, specs_of(leaves), "kept", 0.5, None), **changed)
    return encode_message(note), pack(leaves)


def reject(leaves: list[Tensor], limit: int = 10**6, cut: int | None = None, **changed: Any) -> Rejected:
    note, payload = answer(leaves, **changed)
    with pytest.raises(Rejected) as rejected:
        validate_upload(note, payload[:cut], TASK, RUN, intake(), limit)
    return rejected.value


def intake(n: int = 4, dtype: torch.dtype = torch.float32) -> Any:
    return plain_validator(
        METHOD, torch.zeros(n, dtype=dtype), {"mean": torch.zeros(2), "count": torch.tensor(0)}
    )


def good(n: int = 4, norm: float = 1.0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    descent = torch.full((n,), norm / n**0.5, dtype=torch.float64).to(dtype)
    return trees.leaves(
        (Upload(descent, torch.ones(n, dtype=dtype)), {"mean": torch.ones(2), "count": torch.tensor(7)})
    )


@pytest.mark.slow
def test_no_more_than_one_upload_is_in_memory_beside_the_stack_of_a_buffer() -> None:
    validator, alive = intake(), []
    expected = [good(norm=1.0 + number) for number in range(20)]

    def uploads() -> Iterator[list[Tensor]]:
        for leaves in expected:
            copies = [leaf.clone() for leaf in leaves]
            alive.extend(map(weakref.ref, copies))
            yield copies
            del copies
            gc.collect()
            assert sum(each() is not None for each in alive) <= len(leaves)

    joined = validator.join(uploads(), len(expected))
    for stack, *rows in zip(trees.leaves(joined.uploads), *expected, strict=False):  # without statistics
        assert torch.equal(stack, torch.stack(rows))


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_form_is_that_of_what_clients_send_with_every_method_of_the_catalogue(name: str) -> None:
    world = counting_world()
    algorithm = build(name, Setting(3, 3, 8), {})
    for one, version in [(algorithm, 0), (algorithm, 1), (algorithm.warmup(), 0)]:
        if one is not None:
            results = work(world, one, [Task(client, version, 0) for client in range(3)])
            expected = plain_validator(one, *world.problem.initial(), version)
            leaves = [row(results, number) for number in range(3)]
            assert all(specs_of(each) == expected.form for each in leaves)
            for each in leaves:
                expected.check(each)
            joined = expected.join(leaves, len(leaves))
            assert trees.structure(joined.uploads) == trees.structure(results.uploads)
            sent = (results.uploads, results.statistics)
            for left, right in zip(trees.leaves(joined), trees.leaves(sent), strict=True):
                assert torch.equal(left, right)
                assert left.dtype == right.dtype


def test_methods_of_two_trips_and_of_a_whole_pass_were_among_them() -> None:
    mime = build("mime", Setting(3, 3, 8), {})
    assert traits_of(mime).full_pass
    kinds = [
        plain_validator(mime, torch.zeros(2), {}, version).join([[torch.zeros(2)]], 1) for version in (0, 1)
    ]
    assert [type(kind.uploads) for kind in kinds] == [GradientUpload, UpdateUpload]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_form_follows_the_model(dtype: torch.dtype) -> None:
    names = [name for name, _ in intake(9, dtype).form]
    assert names == [str(dtype).removeprefix("torch.")] * 2 + ["int64", "float32"]
    assert [shape for _, shape in intake(9, dtype).form] == [(9,), (9,), (), (2,)]


def test_a_good_upload_is_taken_as_it_is() -> None:
    note, payload = answer(good())
    _, leaves = validate_upload(note, payload, TASK, RUN, intake(), len(payload))
    assert all(torch.equal(one, other) for one, other in zip(leaves, good(), strict=True))


@pytest.mark.parametrize(
    ("changed", "reason", "said"),
    [
        ({"run": "run-2"}, Reason.RUN, "'run-2'"),
        ({"task": Task(4, 5, 2)}, Reason.TASK, "visit 2 of client 4"),
        ({"task": Task(3, 5, 1)}, Reason.TASK, "visit 1 of client 3"),
        ({"task": Task(3, 4, 2)}, Reason.TASK, "version 4"),
        ({"task": Task(3, 6, 2)}, Reason.VERSION, "version 6"),
        ({"error": "the disk is full."}, Reason.FAILED, "the disk is full."),
        ({"error": "what task?", "run": "unknown", "task": Task(0, 0, 0)}, Reason.FAILED, "what task?"),
        ({"form": ()}, Reason.FORM, "0 tensors, not 4"),
        ({"form": (("float64", (2,)), *specs_of(good())[1:])}, Reason.FORM, "2 float64, not 4 float32"),
        (
            {"form": (("float32", (2, 2)), *specs_of(good())[1:])},
            Reason.FORM,
            "2 by 2 float32, not 4 float32",
        ),
        ({"form": (("float32", (2**40,)), *specs_of(good())[1:])}, Reason.FORM, "1099511627776 float32"),
    ],
)
def test_what_the_note_says_is_held_against_what_was_asked(
    changed: dict[str, Any], reason: Reason, said: str
) -> None:
    rejected = reject(good(), **changed)
    assert rejected.reason is reason
    assert said in rejected.sentence


def test_sizes_are_looked_at_before_the_note_and_before_the_numbers() -> None:
    with pytest.raises(Rejected) as rejected:
        validate_upload("not a note", bytes(101), TASK, RUN, intake(), 100)
    assert rejected.value.reason is Reason.SIZE
    assert reject(good(), cut=-1).reason is Reason.SIZE
    assert reject(good(), limit=47).reason is Reason.SIZE
    assert len(pack(good())) == 48


@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_rejected_wherever_it_is(number: int, value: float) -> None:
    leaves = good()
    leaves[number][1] = value
    leaves[number][0] *= -value  # infinities that would cancel
    rejected = reject(leaves)
    assert rejected.reason is Reason.INFINITE
    assert f"tensor {number} " in rejected.sentence


def test_finite_numbers_whose_sum_is_not_are_let_in() -> None:
    leaves = good()
    leaves[1].fill_(3e38)
    intake().check(leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_norm_above_the_methods_bound_is_rejected_but_for_rounding(dtype: torch.dtype) -> None:
    intake(4, dtype).check(good(4, 1.0009, dtype))
    with pytest.raises(
        Rejected, match=r"the upload's descent has norm 1\.001, which cannot exceed 1"
    ) as rejected:
        intake(4, dtype).check(good(4, 1.0011, dtype))
    assert rejected.value.reason is Reason.NORM


def test_a_norm_that_overflows_the_upload_dtype_is_seen() -> None:
    with pytest.raises(Rejected, match="norm"):
        intake().check(good(norm=3e38))


def test_a_field_without_a_bound_of_its_own_may_be_as_long_as_it_is() -> None:
    leaves = good()
    leaves[1].fill_(1e9)
    intake().check(leaves)
    plain_validator(FedOpt(0.1, 1.0), torch.zeros(4), {}).check([torch.full((4,), 1e9)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("client", range(3))
def test_an_honest_unit_step_in_low_precision_is_within_the_bound(dtype: torch.dtype, client: int) -> None:
    x = torch.zeros(1000, dtype=dtype)
    generator = torch.Generator().manual_seed(client)
    u = torch.randn(1000, generator=generator).to(dtype)
    total = x
    for _ in range(10):  # all steps in one direction: nothing is lost to cancelling
        total = total + u / u.norm()
    plain_validator(METHOD, x, {}).check([total / 10, x])


@pytest.mark.slow
def test_a_long_model_has_more_room_for_what_a_norm_in_single_precision_leaves_out() -> None:
    """11 million equal numbers in float32, added up by one thread, came to a norm 0.8 % too small."""
    size = 11_000_000
    long = plain_validator(METHOD, torch.zeros(size), {})
    step, rest = torch.full((size,), size**-0.5), torch.zeros(size)
    long.check([1.008 * step, rest])
    with pytest.raises(Rejected):
        long.check([1.02 * step, rest])
    exact = plain_validator(METHOD, torch.zeros(size, dtype=torch.float64), {})
    with pytest.raises(Rejected):
        exact.check([1.008 * step.double(), rest.double()])


def spread(**changed: Any) -> tuple[Any, list[Tensor]]:
    statistics = {
        "norm.running_mean": torch.zeros(2),
        "norm.running_var": torch.ones(2),
        "norm.num_batches_tracked": torch.tensor(0),
        "log_var": torch.full((2,), -1.0),
    }
    given = statistics | {name: torch.tensor(value) for name, value in changed.items()}
    return plain_validator(FedOpt(0.1, 1.0), torch.zeros(4), statistics), trees.leaves((torch.ones(4), given))


@pytest.mark.parametrize(
    ("name", "value"), [("norm.running_var", [1.0, -50.0]), ("norm.num_batches_tracked", -1)]
)
def test_a_variance_or_a_count_below_zero_is_rejected(name: str, value: Any) -> None:
    intake, leaves = spread(**{name: value})
    with pytest.raises(Rejected, match=f"{name} is negative") as rejected:
        intake.check(leaves)
    assert rejected.value.reason is Reason.RANGE


def test_running_statistics_that_may_be_below_zero_are_let_in() -> None:
    intake, leaves = spread(**{"norm.running_mean": [-3.0, -4.0], "log_var": [-9.0, 0.0]})
    intake.check(leaves)
    _, fields, statistics = intake.norms(leaves)
    assert list(fields.values()) == [2.0]
    assert statistics == {
        "log_var": 9.0,
        "norm.running_mean": 5.0,
        "norm.running_var": pytest.approx(2**0.5),
    }


def test_norms_are_told_of_what_has_no_bound() -> None:
    assert set(intake().norms(good()).fields) == set(Upload._fields) - set(traits_of(METHOD).bounds)
    assert intake().norms(good(norm=3e38)).fields == intake().norms(good()).fields
