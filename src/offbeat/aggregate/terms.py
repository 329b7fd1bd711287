"""Under which assumptions a run's epsilon holds, in words."""

from offbeat.privacy.correlated import Independent
from offbeat.privacy.spending import Spending


def terms(
    spending: Spending, start: bool, buffer: int, population: int, nominal: int | None, seeded: bool
) -> str:
    """One sentence."""
    if not spending.noise:
        return "no noise was added, so nothing is private."
    if spending.rate is not None:
        parts = [
            f"amplified by Poisson sampling at rate {spending.rate:g}, taking a buffer of fixed size to "
            "amplify as much, which is assumed and not proved, and the sample to be secret, and so the run's "
            "checkpoint, trace and records, which tell of it"
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
