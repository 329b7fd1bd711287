"""Sums in secret as a plan names them, with the helper that it names."""

from offbeat.aggregate.distant import Distant
from offbeat.aggregate.secure import Secure as InSecret
from offbeat.aggregate.summation import Summation
from offbeat.deploy.helper_client import HelperLink
from offbeat.deploy.helper_frames import read_token
from offbeat.deploy.plan import Plan


def summation_of(plan: Plan, run: bytes) -> Summation | None:
    """Of a run with this name, which the helper counts under for ever; None: sums in plain sight."""
    secure = plan.secure
    if secure is None:
        return None
    certificate = None if secure.certificate is None else plan.near(secure.certificate)
    helper = HelperLink(secure.helper, read_token(plan.near(secure.token)), certificate)
    return Distant(InSecret(secure.minimum), run, helper, secure.signed)
