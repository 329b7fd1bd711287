"""Who keeps failing, and for how long they are left alone."""

_MOST = 600.0  # seconds


class Standing:
    """Failures in a row put somebody aside for `base` seconds, doubled each time, at most for ten minutes."""

    def __init__(self, base: float) -> None:
        self._base = base
        self._failures: dict[int, tuple[int, float]] = {}  # how many in a row, and aside until when

    def fail(self, who: int, now: float) -> float:
        """Once more; for how many seconds that puts them aside."""
        count = self._failures.get(who, (0, 0.0))[0] + 1
        seconds: float = min(_MOST, self._base * 2.0 ** min(count - 1, 60))
        self._failures[who] = (count, now + seconds)
        return seconds

    def clear(self, who: int) -> None:
        """It went well, or they are gone."""
        self._failures.pop(who, None)

    def free(self, who: int, now: float) -> bool:
        """Whether they are not aside."""
        return who not in self._failures or now >= self._failures[who][1]
