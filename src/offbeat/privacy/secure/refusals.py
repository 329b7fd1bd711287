"""Why a server refuses to add; each reason is a type, and each message one sentence."""

from collections.abc import Sequence

from offbeat.core import Task
from offbeat.errors import InputError


class RefusedError(InputError):
    """Nothing was added, and nothing counted; `tasks` are the reports at fault, where some are."""

    def __init__(self, sentence: str, tasks: Sequence[Task] = ()) -> None:
        super().__init__(sentence)
        self.tasks = tuple(tasks)


class RunError(RefusedError):
    """The request is of another run."""


class LengthError(RefusedError):
    """The uploads have another length than was agreed."""


class MalformedError(RefusedError):
    """Something is not what it should be before anything is opened."""


class ReplayError(RefusedError):
    """A report is named twice, or all of a batch was added before."""


class OverlapError(RefusedError):
    """Some of a batch was added before."""


class ShortBatchError(RefusedError):
    """Too few distinct clients, or too few with weights that are alike."""


class LongBatchError(RefusedError):
    """More reports than overflow was ruled out for."""


class WeightError(RefusedError):
    """A report's weight is not in (0, 1]."""


class BindingError(RefusedError):
    """A seed was sealed for another report or key, or was changed since."""


class SignatureError(RefusedError):
    """A report is not signed by a site that is known, or not by the one that its client was."""


def name(task: Task) -> str:
    """A report, in words."""
    return f"visit {task.visit} of client {task.client}"
