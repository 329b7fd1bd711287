"""`offbeat privacy`: noise for an epsilon, epsilon of a noise, or of what a run has released."""

import argparse
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.cli import terminal
from offbeat.cli.options import number, option_name, whole_number
from offbeat.errors import InputError, unknown_name
from offbeat.privacy.accountant import (
    Accountant,
    PldAccountant,
    RdpAccountant,
    Releases,
    calibrate,
    check_delta,
    check_epsilon,
    epsilon_if_seen,
    parse_accountant,
    round_up,
)
from offbeat.privacy.correlated import (
    IndependentNoise,
    default_separation,
    max_contributions,
    parse_correlation,
)
from offbeat.privacy.ledger import correct_statement, is_simulated
from offbeat.schedule.dispatch import TIMED_DISPATCH_NAMES

_OPTIONS: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "epsilon": (number, "E", "compute the noise for this epsilon"),
    "noise": (number, "SIGMA", "compute epsilon for this noise multiplier"),
    "delta": (number, "D", "probability beside epsilon, such as 1e-7"),
    "population": (whole_number, "N", "number of clients"),
    "cohort": (whole_number, "S", "clients per server step, on average"),
    "rounds": (whole_number, "T", "server steps"),
    "dispatch": (str, "NAME", "timed-poisson or allocation: how clients are drawn [timed-poisson]"),
    "max_participations": (
        whole_number,
        "N",
        "contributions of a client at most; no sampling is assumed",
    ),
    "min_separation": (
        whole_number,
        "N",
        "server steps between two of them at least; default: 1, or as the noise needs it",
    ),
    "noise_correlation": (
        str,
        "SPEC",
        "over server steps: independent, tree, banded:B or blt[:STEPS] [independent]",
    ),
    "accountant": (str, "NAME", "pld or rdp [pld]"),
}
_OPTIONS_OF_RUNS = ("delta", "accountant")


class PrivacyClaim(NamedTuple):
    """What is released: `times` Gaussian releases with noise divided by `scale`, and the assumptions."""

    times: int
    rate: float | None
    scale: float
    assumption: str
    neighbours: str
    slots: int | None = None

    def releases(self, noise: float) -> list[Releases]:
        """The releases as an accountant composes them."""
        return [Releases(noise / self.scale, self.times, self.rate, self.slots)]


def add_privacy_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `offbeat privacy`."""
    command.add_argument("folder", nargs="?", metavar="RUN_FOLDER", help="compute epsilon of this run so far")
    for name, (kind, word, text) in _OPTIONS.items():
        command.add_argument(option_name(name), type=kind, default=None, metavar=word, help=text)


def privacy_command(given: argparse.Namespace) -> int:
    """Compute noise or epsilon, and print the assumptions behind it."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # dp-accounting warns of rounding to zero
    answer = _answer_for_run(given) if given.folder else _answer_for_numbers(given)
    if given.json:
        print(json.dumps({name: _jsonable(value) for name, value in answer.items()}))
        return 0
    epsilons = answer.pop("epsilons")
    others = {f"epsilon by {name}": value for name, value in epsilons.items() if name != answer["accountant"]}
    simulated = is_simulated(answer["assumption"]) if given.folder else False
    before = "SIMULATION, not a privacy guarantee: " if simulated else ""
    title = f"{before}epsilon {terminal.format_number(answer['epsilon'])} at delta {answer['delta']:g}"
    if answer.get("noise") is not None:
        title += f" with noise of {terminal.format_number(answer['noise'])} times the sensitivity"
    shown = {name.replace("_", " "): value for name, value in answer.items() if value is not None}
    terminal.print_pairs(title, {name: _text(value) for name, value in (shown | others).items()})
    return 0


def _answer_for_numbers(given: argparse.Namespace) -> dict[str, Any]:
    if (given.epsilon is None) == (given.noise is None):
        raise InputError("give either --epsilon, to compute the noise, or --noise, to compute epsilon.")
    if given.delta is None:
        raise InputError("give --delta, well below one in the number of clients, such as 1e-7.")
    check_delta(given.delta)
    accountant = parse_accountant(given.accountant or "pld")
    claim = _sampled_claim(given) if given.max_participations is None else _bounded_claim(given)
    if given.noise is None:
        check_epsilon(given.epsilon)
        least = calibrate(given.epsilon, given.delta, claim.times, claim.rate, accountant, claim.slots)
        noise = round_up(least * claim.scale)
    else:
        noise = given.noise
        if not 0 < noise < math.inf:
            raise InputError(f"--noise is {noise:g}: give a finite number above 0.")
    return {
        "noise": noise,
        **_epsilons(claim.releases(noise), given.delta, accountant),
        "rate": claim.rate,
        "slots": claim.slots,
        "contributions": given.max_participations,
        "assumption": claim.assumption,
        "neighbours": claim.neighbours,
    }


def _answer_for_run(given: argparse.Namespace) -> dict[str, Any]:
    for name in _OPTIONS:
        if name not in _OPTIONS_OF_RUNS and getattr(given, name) is not None:
            raise InputError(f"{option_name(name)} does not apply to a run: leave it out.")
    from offbeat.training import checkpoint  # loads PyTorch

    folder = Path(given.folder)
    path = folder / "checkpoint" / "state.safetensors"
    if not path.exists():
        raise InputError(f"{folder} contains no run with a checkpoint: name the folder of a run.")
    facts = checkpoint.load(path).facts
    try:
        version, spent = facts["version"], facts["aggregate"].get("spent")
        if spent is None:
            raise InputError(
                f"the run in {folder} is not private, since it has neither clipping nor noise: name another."
            )
        delta = spent["delta"] if given.delta is None else given.delta
        check_delta(delta)
        releases = [Releases(*each) for each in spent["releases"]]
        accountant = parse_accountant(given.accountant or spent["accountant"])
        answer = _epsilons(releases, delta, accountant)
        answer |= {
            "version": version,
            "releases": spent["made"],
            "assumption": correct_statement(spent["terms"], releases),
        }
        if spent.get("unamplified"):
            answer["epsilon_where_connections_are_seen"] = epsilon_if_seen(releases, delta)
    except (KeyError, TypeError, AttributeError):
        raise InputError(
            f"the checkpoint in {folder} does not record what was released: use the version of offbeat that "
            "wrote it."
        ) from None
    return answer | {"uncounted": _uncounted(folder, version)}


def _uncounted(folder: Path, version: int) -> str | None:
    """The server steps that were recorded after the checkpoint of a run that continues or was killed."""
    from offbeat.training.folder import read_jsonl

    records = read_jsonl(folder, "records") if (folder / "records.jsonl").exists() else ()
    last = max((record["version"] for record in records), default=version)
    if last <= version:
        return None
    return (
        f"server steps {version + 1} to {last}, made after the last checkpoint; a run that was killed takes "
        "them again when it is resumed, with the same noise, and counts them then"
    )


def _epsilons(releases: list[Releases], delta: float, accountant: Accountant) -> dict[str, Any]:
    """Epsilon by the given accountant, and by the other one if it applies."""
    found: dict[str, float | None] = {accountant.name: accountant.epsilon(releases, delta)}
    for other in (PldAccountant(), RdpAccountant()):
        if other.name not in found:
            try:
                found[other.name] = other.epsilon(releases, delta)
            except InputError:
                found[other.name] = None
    return {
        "epsilon": found[accountant.name],
        "delta": delta,
        "accountant": accountant.name,
        "epsilons": found,
    }


def _sampled_claim(given: argparse.Namespace) -> PrivacyClaim:
    """The claim for clients that are sampled."""
    for name in ("population", "cohort", "rounds"):
        if getattr(given, name) is None:
            raise InputError(
                f"give {option_name(name)} too: sampling needs --population, --cohort and --rounds; "
                "give --max-participations instead where clients are not sampled."
            )
    _check_counts(given)
    if given.min_separation is not None or not isinstance(
        parse_correlation(given.noise_correlation or "independent"), IndependentNoise
    ):
        raise InputError(
            "--min-separation and correlated noise rest on how often a client contributes: give "
            "--max-participations."
        )
    neighbours = "runs that differ by one client, added or removed"
    name = given.dispatch or "timed-poisson"
    if name == "allocation":
        slots = given.population // given.cohort
        return PrivacyClaim(
            -(-given.rounds // slots),
            None,
            1.0,
            f"amplified by random allocation: each client contributes to one of every {slots:,} server "
            "steps, drawn independently of all else, nobody learns to which, and the server releases by a "
            "clock whatever has arrived, as runs with --dispatch allocation do",
            neighbours,
            slots,
        )
    if name != "timed-poisson":
        raise unknown_name("dispatch by a clock", name, TIMED_DISPATCH_NAMES)
    rate = given.cohort / given.population
    return PrivacyClaim(
        given.rounds,
        rate,
        1.0,
        f"amplified by Poisson sampling: at each of {given.rounds:,} server steps each client is drawn with "
        f"probability {rate:.4g}, independently of all else, nobody learns who was, and the server releases "
        "whatever was drawn at each step, as runs with --dispatch timed-poisson do, and a run with a buffer "
        "of fixed size does not",
        neighbours,
    )


def _bounded_claim(given: argparse.Namespace) -> PrivacyClaim:
    """The claim for a bounded number of contributions, without amplification."""
    if given.dispatch is not None:
        raise InputError("--dispatch says how clients are drawn: leave --max-participations or it out.")
    _check_counts(given)
    shape = parse_correlation(given.noise_correlation or "independent")
    apart = default_separation(shape) if given.min_separation is None else given.min_separation
    times = f"at most {given.max_participations:,} time{'s' if given.max_participations > 1 else ''}"
    if apart > 1:
        times += f", at least {apart:,} server steps apart"
    words = f"no amplification: each client contributes {times}, once to a server step, and when is public"
    neighbours = "runs that differ by one client, there with all it contributes or with nothing in its place"
    if isinstance(shape, IndependentNoise):
        most = (
            given.max_participations
            if given.rounds is None
            else max_contributions(given.rounds, given.max_participations, apart)
        )
        return PrivacyClaim(most, None, 1.0, words, neighbours)
    if given.rounds is None:
        raise InputError("correlated noise depends on how long a run is: give --rounds.")
    scale = shape.sensitivity(given.rounds, given.max_participations, apart)
    words += f"; noise is correlated over {given.rounds:,} server steps ({shape.name})"
    return PrivacyClaim(1, None, scale, f"{words}, which a client moves by at most {scale:.4g}", neighbours)


def _check_counts(given: argparse.Namespace) -> None:
    for name in ("population", "cohort", "rounds", "max_participations", "min_separation"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise InputError(f"{option_name(name)} is {value}: give at least 1.")
    population, cohort, rounds, most = given.population, given.cohort, given.rounds, given.max_participations
    if None not in (population, cohort) and cohort > population:
        raise InputError(
            f"a cohort of {cohort:,} cannot come from {population:,} clients: lower it, or add clients."
        )
    if None not in (population, cohort, rounds, most) and cohort * rounds > population * most:
        raise InputError(
            f"{rounds:,} server steps of {cohort:,} clients take more than {most:,} contributions of each of "
            f"{population:,}: raise --max-participations, or lower --rounds."
        )


def _jsonable(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, dict):
        return {name: _jsonable(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _text(value: Any) -> Any:
    return "infinite" if value == math.inf else value
