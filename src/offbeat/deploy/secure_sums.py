"""Sums in secret as a plan names them, with the helper that it names."""

from offbeat.aggregate.distant import Distant
from offbeat.aggregate.secure import Secure as InSecret
from offbeat.aggregate.summation import Summation
from offbeat.deploy.helper_client import HelperLink
from offbeat.deploy.plan import Plan
from offbeat.errors import InputError


def summation_of(plan: Plan, run: bytes) -> Summation | None:
    """Of a run with this name, which the helper counts under for ever; None: sums in plain sight."""
    secure = plan.secure
    if secure is None:
        return None
    certificate = None if secure.certificate is None else plan.near(secure.certificate)
    try:
        token = plan.near(secure.token).read_text("ascii").strip()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"token of [secure] cannot be read ({reason}): name the helper's token.") from None
    helper = HelperLink(secure.helper, token, certificate)
    return Distant(InSecret(secure.minimum), run, helper, secure.signed)
