"""Sums in secret as a settings file names them."""

from pathlib import Path
from typing import Any

import pytest

from deploy_world import Log
from offbeat.aggregate.secure import RemoteSecure
from offbeat.deploy.config import ServeConfig
from offbeat.deploy.server.setup import secure_summation, set_up
from offbeat.errors import InputError

SECURE = {"helper": "http://127.0.0.1:9", "token": "helper.token", "minimum": 3}


def plan(folder: Path, secure: dict[str, Any] | None) -> ServeConfig:
    given: dict[str, Any] = {
        "task": {"function": "test_server_setup:plain_task"},
        "training": {"algorithm": "fedbuff", "clients": 6, "buffer": 3, "weights": "constant"},
    }
    return ServeConfig.of(given | ({} if secure is None else {"secure": secure}), folder)


def test_sums_are_in_plain_sight_unless_asked_for(tmp_path: Path) -> None:
    assert secure_summation(plan(tmp_path, None), b"run", Log()) is None


def test_a_run_is_put_together_without_asking_the_helper(tmp_path: Path) -> None:
    (tmp_path / "helper.token").write_text("a-secret-of-some-length\n")
    made = plan(tmp_path, SECURE)
    summation = secure_summation(made, b"run", Log())
    assert isinstance(summation, RemoteSecure)
    assert (summation.run, summation.secure.minimum, summation.signed) == (b"run", 3, True)
    assert "a-secret" not in repr(set_up(made, summation=summation).aggregate)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"token": "none"}, "none cannot be read"),
        ({"token": "many.lines"}, "does not contain a token"),
        ({"helper": "http://server.example:9"}, "use https"),
        ({"certificate": "none.crt"}, "there is no file"),
    ],
)
def test_a_helper_that_cannot_be_used_is_one_sentence(
    tmp_path: Path, change: dict[str, str], sentence: str
) -> None:
    (tmp_path / "helper.token").write_text("a-secret-of-some-length\n")
    (tmp_path / "many.lines").write_text("-----BEGIN CERTIFICATE-----\nand so on\n")
    with pytest.raises(InputError) as caught:
        secure_summation(plan(tmp_path, SECURE | change), b"run", Log())
    assert sentence in str(caught.value)
