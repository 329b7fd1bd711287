"""`offbeat audit`: attacks on the pipeline of a private run, and the epsilon that they prove."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from offbeat.cli import terminal
from offbeat.cli.options import number, whole_number
from offbeat.errors import InputError
from offbeat.files import replace_file

_DRAWING = "audit.svg"


def add_audit_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `offbeat audit`."""
    command.add_argument("run", metavar="RUN", help="the folder of a private run, or a settings.json")
    command.add_argument(
        "--trials", type=whole_number, default=20_000, metavar="N", help="canaries to guess about [20000]"
    )
    command.add_argument(
        "--replacements",
        type=whole_number,
        default=1_000,
        metavar="N",
        help="runs with and without one client, where the sample is secret [1000]",
    )
    command.add_argument("--confidence", type=number, default=0.95, metavar="C", help="of the bound [0.95]")
    command.add_argument(
        "--delta",
        type=number,
        default=None,
        metavar="D",
        help="audit the claim at this delta; at 0.01 fewer trials are needed [the run's]",
    )
    command.add_argument(
        "--out",
        metavar="FILE",
        help=f"where to draw the error rates, as SVG [{_DRAWING} beside the settings]",
    )


def audit_command(given: argparse.Namespace) -> int:
    """Attack the pipeline, print and draw what was proved; the exit code is 1 if the claim was refuted."""
    from offbeat.privacy.accountant import check_delta
    from offbeat.training.audit import audit  # loads PyTorch
    from offbeat.training.experiment import Experiment
    from offbeat.training.settings_file import read

    path = Path(given.run)
    folder = path.parent if path.name == "settings.json" else path
    if not (folder / "settings.json").is_file():
        raise InputError(f"{path} is neither a run nor its settings.json: name the folder of a private run.")
    if given.delta is not None:
        check_delta(given.delta)
    experiment = Experiment.from_settings(read(folder))
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("audit", total=None)
        outcome = audit(
            experiment,
            given.trials,
            given.replacements,
            given.confidence,
            given.delta,
            lambda done, whole: progress.update(task, completed=done, total=whole),
        )
    out = Path(given.out) if given.out else folder / _DRAWING
    try:
        replace_file(out, _draw(outcome).encode())
    except OSError as error:
        raise InputError(f"{out} cannot be written ({error.strerror}): name another file by --out.") from None
    answer: dict[str, Any] = {
        "claimed": outcome.claimed,
        "proved": outcome.proved,
        "refuted": outcome.refuted,
        "delta": outcome.delta,
        "confidence": outcome.confidence,
        "attacks": {
            attack.name: {"trials": attack.trials, "epsilon": attack.epsilon} for attack in outcome.attacks
        },
        "terms": outcome.terms,
        "drawing": str(out),
    }
    if given.json:
        print(json.dumps(answer))
        return int(outcome.refuted)
    verdict = "is REFUTED" if outcome.refuted else "was not refuted"
    terminal.print_pairs(
        f"the claim of epsilon {outcome.claimed:.4g} at delta {outcome.delta:g} {verdict}",
        {
            "epsilon that the attacks prove": outcome.proved,
            "confidence": outcome.confidence,
            "claims that would have been refuted": f"below {outcome.proved:.4g}",
            **{
                f"by {attack.name}": f"{attack.epsilon:.4g} in {attack.trials:,} trials"
                for attack in outcome.attacks
            },
            "claim": outcome.terms,
            "drawn in": str(out),
        },
    )
    return int(outcome.refuted)


def _draw(outcome: Any) -> str:
    """False and true positives of the attacks, and the most that the claim allows."""
    from offbeat.report.chart import Axis, Figure, Series
    from offbeat.report.svg import draw, standalone
    from offbeat.training.audit import error_rates

    lines = []
    for style, attack in enumerate(outcome.attacks, 1):
        rates = sorted(error_rates(attack))
        if rates:
            mistakes, hits = np.array(rates).T
            lines.append(Series(style, f"attack by {attack.name}", mistakes, hits))
    least = min((float(line.xs[0]) for line in lines), default=1e-3)
    xs = np.geomspace(least, 1.0, 60)
    allowed = np.minimum(1.0, np.exp(min(outcome.claimed, 700.0)) * xs + outcome.delta)
    lines.insert(0, Series(0, f"the most that epsilon {outcome.claimed:.3g} allows", xs, allowed))
    figure = Figure(
        "audit",
        "Guesses whether a client took part",
        Axis("false positives", log=True),
        Axis("true positives", log=True),
        tuple(lines),
        (f"with confidence {outcome.confidence:g} epsilon is at least {outcome.proved:.4g}",),
        runs=tuple(line.label for line in lines),
    )
    return standalone(draw(figure))
