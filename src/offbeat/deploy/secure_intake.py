"""Uploads that their sites hid: what can still be checked of them, and what becomes of a buffer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.aggregate.aggregation import Hiding
from offbeat.aggregate.payload import Shares
from offbeat.core import Task
from offbeat.deploy.lengths import Norms
from offbeat.deploy.rejections import Reason, Rejected
from offbeat.deploy.signing import SIGNATURE
from offbeat.deploy.wire import Form
from offbeat.engines.engine import Gathered
from offbeat.privacy.secure.refusals import BindingError, SignatureError
from offbeat.privacy.secure.sealing import SEALED


@dataclass(frozen=True)
class SecureIntake:
    """Shares look random whatever they are of, so there is nothing to check in their numbers."""

    form: Form
    ask: Callable[[Task, bytes, bytes], None]
    since: int = 0  # reports from before this version are of no use any more

    def check(self, leaves: list[Tensor]) -> None:
        pass

    def norms(self, leaves: list[Tensor]) -> Norms:
        return Norms("hidden", {}, {})

    def examine(self, task: Task, leaves: list[Tensor]) -> None:
        """Reject what the helper could not add, so that it spoils no sum; waits for a helper that is down."""
        if task.version < self.since:
            return
        sealed, signature = (leaf.numpy().tobytes() for leaf in leaves[1:])
        try:
            self.ask(task, sealed, signature)
        except (
            BindingError,
            SignatureError,
        ) as refusal:  # all else is not of the site's making: the run ends
            raise Rejected(Reason.MALFORMED, f"the helper cannot use this report: {refusal}") from None

    def join(self, uploads: Sequence[list[Tensor]]) -> Gathered:
        share, sealed, signature = (torch.stack(each) for each in zip(*uploads, strict=True))
        return Gathered(Shares(share, sealed, signature if signature.numel() else None), {})


def secure_intake(hiding: Hiding, version: int = 0) -> SecureIntake:
    """For the uploads of clients that hide them so, told from this version on."""
    facts = hiding.facts
    signature = SIGNATURE if facts["signed"] else 0
    form = (("int32", (facts["length"],)), ("uint8", (SEALED,)), ("uint8", (signature,)))
    # under bounds that move, stale reports were clipped to others: they open no more, and are not summed
    return SecureIntake(form, hiding.examine, version if facts["moving"] else 0)
