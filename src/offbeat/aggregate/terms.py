"""Under which assumptions a run's epsilon holds, in words."""

from collections.abc import Iterable

from offbeat.errors import InputError
from offbeat.privacy.accountant import Releases
from offbeat.privacy.correlated import Independent
from offbeat.privacy.spending import Spending

SIMULATION = "SIMULATION: this is not a privacy guarantee"
_REFUTED = (
    "amplification by sampling does not hold for a buffer of fixed size, where another client takes the "
    "place of one that is absent"
)
# How the terms of runs began and went on while a fixed-size buffer was taken to amplify.
_BEFORE = "amplified by Poisson sampling"
_ASSUMED = (
    ", taking a buffer of fixed size to amplify as much, which is assumed and not proved, and the sample"
)


def amplification_refused(most: str, simulate: str) -> InputError:
    """For whoever claims amplification, with the words for what to do instead."""
    return InputError(
        f"{_REFUTED}: bound how often a client contributes with {most}, or give {simulate} for a figure that "
        "is not a guarantee."
    )


def is_simulated(said: str, releases: Iterable[Releases] = ()) -> bool:
    """Whether an epsilon counts on amplification that does not hold; also by the words of before."""
    return said.startswith((SIMULATION, _BEFORE)) or any(each.rate is not None for each in releases)


def corrected(said: str, releases: Iterable[Releases] = ()) -> str:
    """The terms that a run was saved with; those that took amplification to hold say that it does not."""
    if said.startswith(SIMULATION) or not is_simulated(said, releases):
        return said
    return f"{SIMULATION}, since {_REFUTED}; computed as {said.replace(_ASSUMED, ', taking the sample')}"


def corrected_end(ended: str | None, said: str) -> str | None:
    """Why a run ended; a budget that was spent on such terms is a simulated one."""
    if ended is None or not is_simulated(said):
        return ended
    return ended.replace("the privacy budget", "the simulated budget (no privacy guarantee)")


def terms(
    spending: Spending, start: bool, buffer: int, population: int, nominal: int | None, seeded: bool
) -> str:
    """One sentence."""
    if not spending.noise:
        return "no noise was added, so nothing is private."
    if spending.rate is not None:
        parts = [
            f"{SIMULATION}, since {_REFUTED}",
            f"computed as amplified by Poisson sampling at rate {spending.rate:g}, taking the sample to be "
            "secret, and so the run's checkpoint, trace and records, which tell of it",
        ]
        if start:
            parts.append("the start of everybody is counted without amplification")
    else:
        times = f"{spending.most} time{'s' if spending.most != 1 else ''}"
        parts = [f"no amplification: no client contributes more than {times}, and when it did is public"]
    if not isinstance(spending.correlation, Independent):
        parts.append(f"noise is correlated over server steps ({spending.correlation.name})")
    parts.append(
        "neighbouring runs differ by one client, there with all it contributes or with nothing in its place"
    )
    parts.append(f"accountant {spending.accountant.name}")
    if spending.delta * population >= 1:
        parts.append(f"delta is not below one in the {population} clients, so this promises little")
    if nominal is not None:
        parts.append(
            f"SIMULATION: the noise is scaled by {buffer}/{nominal}, so this epsilon is that of cohorts of "
            f"{nominal} and not of this run"
        )
    if seeded:
        parts.append("SIMULATION: noise and sample follow from a seed, which hides nothing from who knows it")
    return "; ".join(parts) + "."
