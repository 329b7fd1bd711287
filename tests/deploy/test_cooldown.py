"""Whoever keeps failing is left alone, for longer each time."""

from deploy_world import Clock
from offbeat.deploy.protocol.transport import Cooldown


def test_each_failure_in_a_row_doubles_the_time_up_to_ten_minutes() -> None:
    cooldown = Cooldown(2.0, Clock())
    assert [cooldown.fail(3) for _ in range(12)] == [
        2, 4, 8, 16, 32, 64, 128, 256, 512, 600, 600, 600,
    ]  # fmt: skip


def test_a_cooldown_is_over_when_its_time_is() -> None:
    clock = Clock()
    cooldown = Cooldown(2.0, clock)
    cooldown.fail(3)
    clock.sleep(1.5)
    assert not cooldown.is_over(3)
    assert cooldown.is_over(4)
    clock.sleep(0.5)
    assert cooldown.is_over(3)


def test_a_success_resets_it() -> None:
    cooldown = Cooldown(2.0, Clock())
    for _ in range(5):
        cooldown.fail(3)
    cooldown.reset(3)
    assert cooldown.is_over(3)
    assert cooldown.fail(3) == 2


def test_a_thousand_failures_are_still_ten_minutes() -> None:
    cooldown = Cooldown(2.0, Clock())
    for _ in range(5000):
        seconds = cooldown.fail(0)
    assert seconds == 600
