"""Who is told what happens in a session."""

from typing import Protocol

from offbeat.core import Task
from offbeat.deploy.rejections import Reason


class Told(Protocol):
    """Somebody who looks on; nothing of the run depends on it."""

    def joined(self, node: int, name: str, client: int) -> None: ...

    def left(self, node: int, client: int | None) -> None: ...

    def sent(self, client: int, task: Task, size: int) -> None: ...

    def accepted(self, client: int, task: Task, seconds: float, size: int, work: float) -> None: ...

    def rejected(self, node: int, client: int | None, reason: Reason, sentence: str) -> None: ...

    def lost(self, client: int, task: Task) -> None: ...

    def set_aside(self, client: int, task: Task) -> None: ...

    def aside(self, client: int, seconds: float) -> None: ...

    def unreachable(self, sentence: str) -> None: ...

    def reachable(self) -> None: ...


class Nobody:
    """Looks away."""

    def joined(self, node: int, name: str, client: int) -> None:
        pass

    def left(self, node: int, client: int | None) -> None:
        pass

    def sent(self, client: int, task: Task, size: int) -> None:
        pass

    def accepted(self, client: int, task: Task, seconds: float, size: int, work: float) -> None:
        pass

    def rejected(self, node: int, client: int | None, reason: Reason, sentence: str) -> None:
        pass

    def lost(self, client: int, task: Task) -> None:
        pass

    def set_aside(self, client: int, task: Task) -> None:
        pass

    def aside(self, client: int, seconds: float) -> None:
        pass

    def unreachable(self, sentence: str) -> None:
        pass

    def reachable(self) -> None:
        pass
