"""The environment of processes that use Flower."""

from pathlib import Path

import pytest

from offbeat.deploy.flower.commands import flower_environment


def test_nothing_is_reported_unless_the_user_wants_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FLWR_TELEMETRY_ENABLED", "FLWR_DISABLE_UPDATE_CHECK", "FLWR_HOME"):
        monkeypatch.delenv(name, raising=False)
    own = flower_environment(tmp_path)
    assert own["FLWR_TELEMETRY_ENABLED"] == "0"
    assert own["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert own["FLWR_HOME"] == str(tmp_path)
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    assert flower_environment(tmp_path)["FLWR_TELEMETRY_ENABLED"] == "1"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Flower imports
def test_no_variable_opens_a_port_of_flower_beside_the_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flwr.common import constant

    opening = [value for name, value in vars(constant).items() if name.startswith("FLWR_INTERNAL_GRPC")]
    assert opening, "Flower opens its gRPC ports by other variables now"
    for name in opening:
        monkeypatch.setenv(name, "1")
    assert not set(opening) & flower_environment(tmp_path).keys()
