"""What a helper does with a request: whether it may be answered, whether it was before, and the answer."""

import threading
from collections.abc import Mapping

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from offbeat.aggregate.distant import Known
from offbeat.core import Task
from offbeat.deploy.helper_frames import Asking
from offbeat.deploy.helper_store import Page, Store, digest
from offbeat.deploy.signing import signs, statement
from offbeat.privacy.secure.helper import add
from offbeat.privacy.secure.once import Counted, Counts
from offbeat.privacy.secure.refusals import RunError, SignatureError, name
from offbeat.privacy.secure.sealing import unseal
from offbeat.privacy.secure.terms import Terms


class Desk:
    """A helper of any number of runs, one request at a time.

    With the public keys of `sites`, a report counts only if one of them signed it; each client of a
    run is one of them for good, and no two clients are the same one. So a leader cannot make up the
    clients between which it would find a single upload. Reports of one sum were all clipped to the same
    bounds, and no run is served whose sums may be of fewer clients than `minimum`.

    What remains rests on a leader that follows the protocol. It chooses which of the real reports to
    sum, and what sites are sent: with other models or plans for some, whose updates come to nothing,
    it learns of the rest from a sum. Sites that help it count as real ones.
    """

    def __init__(
        self,
        key: X25519PrivateKey,
        store: Store,
        sites: Mapping[str, EllipticCurvePublicKey] | None = None,
        minimum: int = 2,
    ) -> None:
        self._key = key
        self._store = store
        self._sites = sites
        self._minimum = minimum
        self._turn = threading.Lock()  # also a bound on memory: one sum at a time

    @property
    def known(self) -> Known:
        """What anybody may know of it."""
        return Known(self._key.public_key().public_bytes_raw(), self._sites is not None, self._minimum)

    def close(self) -> None:
        """Let go of the store."""
        self._store.close()

    def add(self, asking: Asking) -> bytes:
        """The sum as little-endian numbers of 32 bits, or a refusal that changes nothing."""
        terms, request = asking
        self._check(terms)
        mark = digest(request, terms)
        with self._turn, self._store.page(terms) as page:
            again = page.answered(mark)
            counted: Counts = Counted() if again else page
            page.bind(self._signers(asking, page))
            total = add(request, terms, self._key, counted)
            if not again:
                page.answer(mark)
        return total.astype("<u4", copy=False).tobytes()

    def examine(self, asking: Asking) -> None:
        """Refuse reports that could not be added; nothing is counted."""
        terms, request = asking
        self._check(terms)
        with self._turn, self._store.page(terms) as page:
            page.bind(self._signers(asking, page))
            for task, seed in request.reports:
                unseal(seed, task, terms, self._key)

    def _check(self, terms: Terms) -> None:
        if terms.minimum < self._minimum:
            raise RunError(
                f"this helper adds the reports of at least {self._minimum} clients, and the run's sums may "
                f"be of {terms.minimum}: begin a run with a higher minimum."
            )

    def _signers(self, asking: Asking, page: Page) -> dict[Task, str]:
        """Whose key each report is signed with."""
        if self._sites is None:
            return {}
        terms, request = asking
        signatures = request.signatures or (b"",) * len(request.reports)
        found = {}
        for (task, seed), signature in zip(request.reports, signatures, strict=True):
            message = statement(terms, task, seed)
            own = page.site(task.client)
            tried = self._sites if own is None else {own} & self._sites.keys()
            key = next((one for one in tried if signs(self._sites[one], message, signature)), None)
            if key is None:
                who = "a site that is known" if own is None else "the site that its client is"
                raise SignatureError(f"{name(task)} is not signed by {who}: leave that report out.", [task])
            found[task] = key
        return found
