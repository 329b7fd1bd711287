"""Compressed uploads and robust aggregation over a network: fewer bytes, and the model of the simulator."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deploy_world import Deployment, Letter, ramdisk, site_plan
from offbeat import Median, TrimmedMean
from offbeat.aggregate.mean import Aggregator
from offbeat.deploy.protocol.strict_json import Reason, Rejected
from offbeat.deploy.protocol.transport import Reply
from offbeat.deploy.server.session import StopRequested
from offbeat.deploy.site.site import read_plan
from offbeat.errors import InputError

PARAMETERS = 18  # in float64
BYTES = {None: 8 * PARAMETERS, "8bit": PARAMETERS + 8, "topk:0.1": 2 * (4 + 8)}


@pytest.fixture
def place() -> Iterator[Path]:
    with ramdisk() as folder:
        yield folder


def watch(run: Deployment) -> list[int]:
    """The bytes of each upload that is sent from now on."""
    seen: list[int] = []

    def meddle(letter: Letter, reply: Reply) -> list[Reply]:
        if letter.kind == "task":
            seen.append(len(reply.payload))
        return [reply]

    run.network.meddle = meddle
    return seen


@pytest.mark.parametrize("compress", BYTES)
@pytest.mark.parametrize(("name", "vectors"), [("fedbuff", 1), ("ca2fl", 1), ("scaffold", 2)])
def test_sites_send_fewer_bytes_and_give_the_model_of_the_simulator(
    place: Path, name: str, vectors: int, compress: str | None
) -> None:
    run = Deployment(place, name, compress=compress)
    sent = watch(run)
    with run.joined():
        run.serve()
    assert set(sent) == {vectors * BYTES[compress]}
    torch.testing.assert_close(run.model(), run.simulated(), rtol=0, atol=1e-14)
    assert not run.log.reasons()


def test_a_start_of_everybody_is_whole_and_the_rest_compressed(place: Path) -> None:
    run = Deployment(place, "padamfed-vr", compress="topk:0.1")
    sent = watch(run)
    with run.joined():
        run.serve()
    assert set(sent[5:]) == {3 * BYTES["topk:0.1"]}
    assert min(sent[:5]) > max(sent[5:])
    torch.testing.assert_close(run.model(), run.simulated(), rtol=0, atol=1e-14)


def test_what_sites_left_out_survives_a_restart_of_the_server(place: Path) -> None:
    run = Deployment(place, "fedbuff", compress="topk:0.1")
    with run.joined():
        with pytest.raises(StopRequested):
            run.serve(stop=lambda: run.clock.now > 1007)
        run.network.letters.clear()
        run.serve(resume=True)
    torch.testing.assert_close(run.model(), run.simulated(), rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("compress", "payload", "reason"),
    [
        ("topk:0.1", bytes(24), Reason.RANGE),  # place 0 twice
        ("topk:0.1", b"\0\0\0\0\xff\0\0\0" + bytes(16), Reason.RANGE),  # place 255 of 18
        ("topk:0.1", b"\0\0\0\0\1\0\0\0" + b"\xff" * 16, Reason.INFINITE),
        ("8bit", bytes(18) + b"\xff" * 8, Reason.INFINITE),
        ("8bit", b"\x7f" * 18 + b"\0" * 6 + b"\xef\x7f", Reason.INFINITE),  # 127 times nearly the largest
        ("8bit", b"\x7f" * 18 + b"\0" * 6 + b"\xe0\x43", Reason.NORM),
        ("8bit", bytes(144), Reason.SIZE),
    ],
)
def test_an_upload_that_cannot_be_decoded_or_is_huge_is_rejected(
    place: Path, compress: str, payload: bytes, reason: Reason
) -> None:
    run = Deployment(place, "fedbuff", compress=compress, rounds=3)
    done: list[Letter] = []

    def meddle(letter: Letter, reply: Reply) -> list[Reply]:
        if letter.kind != "task" or done:
            return [reply]
        done.append(letter)
        return [reply._replace(payload=payload)]

    run.network.meddle = meddle
    with run.joined():
        run.serve()
    assert run.log.reasons() == [reason]
    torch.testing.assert_close(run.model(), run.simulated(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("aggregate", [Median(), TrimmedMean(0.34)])
def test_a_deployment_has_robust_aggregation(place: Path, aggregate: Aggregator) -> None:
    run = Deployment(place, "fedbuff", aggregate=aggregate)
    with run.joined():
        run.serve()
    torch.testing.assert_close(run.model(), run.simulated(), rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        ({"compress": "zip"}, "unknown compression 'zip'"),
        ({"compress": 8}, "compress"),
        ({"compress": "topk:0"}, "cannot send a share of 0"),
    ],
)
def test_a_site_refuses_a_plan_with_a_compression_that_cannot_be(plan: dict[str, Any], sentence: str) -> None:
    with pytest.raises((InputError, Rejected), match=sentence):
        read_plan(site_plan(**plan))
