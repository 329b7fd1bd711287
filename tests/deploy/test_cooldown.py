"""Who keeps failing is left alone, for longer each time."""

from offbeat.deploy.protocol.transport import Cooldown


def test_each_failure_in_a_row_doubles_the_time_up_to_ten_minutes() -> None:
    standing = Cooldown(2.0)
    assert [standing.fail(3, 0.0) for _ in range(12)] == [
        2, 4, 8, 16, 32, 64, 128, 256, 512, 600, 600, 600,
    ]  # fmt: skip


def test_nobody_is_free_before_their_time_is_over() -> None:
    standing = Cooldown(2.0)
    standing.fail(3, 10.0)
    assert not standing.free(3, 11.9)
    assert standing.free(3, 12.0)
    assert standing.free(4, 10.0)


def test_a_success_is_a_new_beginning() -> None:
    standing = Cooldown(2.0)
    for _ in range(5):
        standing.fail(3, 0.0)
    standing.clear(3)
    assert standing.free(3, 0.0)
    assert standing.fail(3, 0.0) == 2


def test_a_thousand_failures_are_still_ten_minutes() -> None:
    standing = Cooldown(2.0)
    for _ in range(5000):
        seconds = standing.fail(0, 0.0)
    assert seconds == 600
