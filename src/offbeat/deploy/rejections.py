"""Why something that came over the network is not used."""

from enum import Enum

_SHOWN = 40  # characters of what a stranger sent, in a sentence


class Reason(Enum):
    """One word for counts and logs."""

    MALFORMED = "malformed"  # a note that cannot be read
    RUN = "run"  # of another run
    TASK = "task"  # not expected, or not this node's
    REPEATED = "repeated"
    VERSION = "version"  # from the future
    SIZE = "size"
    FORM = "form"  # dtype or shape
    INFINITE = "infinite"  # NaN too
    NORM = "norm"  # above the method's own bound, or what is usual in the run
    RANGE = "range"  # a number where none such can be
    SETTINGS = "settings"  # the site is set up for something else
    FAILED = "failed"  # the site raised
    LATE = "late"  # after the deadline
    GONE = "gone"  # the node left
    AWAY = "away"


class Rejected(Exception):  # noqa: N818 - an outcome that is counted, not a fault of the program
    """Nothing of it was used; the sentence is for the log, and safe to print."""

    def __init__(self, reason: Reason, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.sentence = sentence


def quote(value: object) -> str:
    """A stranger's value for a sentence: shortened, and escaped to plain ASCII on one line."""
    if isinstance(value, dict | list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    shown = ascii(value[:_SHOWN] if isinstance(value, str) else value)
    return shown if len(shown) <= _SHOWN + 2 else f"{shown[:_SHOWN]}..."
