"""What `offbeat tune` saves against a full grid at equal best accuracy, on Fashion-MNIST.

    python -m experiments.tuning.study --data-dir FOLDER   # runs what has no record yet: minutes on a core
    python -m experiments.tuning.study --write             # writes the table into README.md

Each record is one command, and its processor time is that of the whole command. The row `killed` is the
search again, whose process is killed at server steps of its trials and resumed until it ends.
"""

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

HERE = Path(__file__).parent
RECORDS, PAGE = HERE / "records.jsonl", HERE / "README.md"
SEEDS = (0,)
RUN = ("--data", "fashion-mnist", "--model", "mlp", "--rounds", "100", "--eval-every", "5")
GRID = ("--search", "local_lr=0.01,0.03,0.1,0.3,1", "--search", "server_lr=0.3,1,3", "--sampler", "grid")
RANGES = ("--search", "local_lr=0.01:1", "--search", "server_lr=0.3:3")
STUDIES = {
    "grid": (*GRID, "--pruner", "none"),
    "halving": (*GRID, "--pruner", "halving"),
    "search": (*RANGES, "--trials", "15"),
}
NEEDED = "needed"  # the search with as many trials as it needs to pass the grid
KILLED = "killed"  # the search, killed and resumed
UNTUNED = "untuned"  # one run of the default method
KINDS = (*STUDIES, NEEDED, KILLED, UNTUNED)
KILLS = ("0001", "0006", "0011")  # trials whose first evaluation ends the process


def words(kind: str, seed: int, trials: int | None = None) -> list[str]:
    """The command of a study, without its folders."""
    end = ["--seed", str(seed)]
    if kind == UNTUNED:
        return ["run", "cadence", *RUN, *end]
    own = STUDIES["search" if kind in (NEEDED, KILLED) else kind]
    more = [] if trials is None else ["--trials", str(trials)]
    return ["tune", "fedbuff", *RUN, *own, *more, "--baseline", "none", *end]


def command(given: list[str]) -> dict[str, Any]:
    """The JSON that a command prints, with the processor seconds that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "offbeat", *given, "--json"], check=True, stdout=subprocess.PIPE
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found: dict[str, Any] = json.loads(done.stdout)
    return found | {"processor": after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime}


def kill_when(path: Path, given: list[str]) -> None:
    """Start a command, and kill it once a file is there."""
    process = subprocess.Popen([sys.executable, "-m", "offbeat", *given], stdout=subprocess.DEVNULL)
    while not (path.exists() and path.stat().st_size):
        if process.poll() is not None:
            raise SystemExit(f"the command ended before {path} was there.")
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def measure(kind: str, seed: int, data: str, trials: int | None) -> dict[str, Any]:
    """Run one study, and keep what the table needs of it."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/study"
        given = [*words(kind, seed, trials), "--data-dir", data, "--out", out]
        if kind == KILLED:
            for each in KILLS:
                kill_when(Path(out) / "trials" / each / "records.jsonl", given)
                given = ["tune", "--out", out, "--resume"]
        found = command(given)
    facts = {"kind": kind, "seed": seed, "processor": round(found["processor"], 1)}
    if kind == UNTUNED:
        last = found["last"]
        return facts | {"best": last["accuracy"], "client_updates": last["client_updates"]}
    trial_facts = ("parameters", "state", "value", "steps", "client_updates")
    return facts | {
        "best": found["best"]["value"],
        "client_updates": found["client_updates"],
        "trials": [[each[name] for name in trial_facts] for each in found["trials"]],
        "curve": found["curve"],
    }


def key(record: dict[str, Any]) -> tuple[str, int]:
    """The study that a record is of."""
    return record["kind"], record["seed"]


def records() -> dict[tuple[str, int], dict[str, Any]]:
    """Those that are there."""
    lines = RECORDS.read_text().splitlines() if RECORDS.exists() else []
    return {key(record): record for record in map(json.loads, lines)}


def trials_needed(search: dict[str, Any], accuracy: float) -> int | None:
    """How many trials a search takes to a value; None if it does not get there."""
    counts = [count for count, _, best in search["curve"] if best is not None and best >= accuracy]
    return min(counts, default=None)


def table() -> str:
    """The best of each seed, the mean cost, and what is saved against the full grid of the same seed."""
    found = records()
    rows = [
        "| study | best accuracy | trials | client updates | processor time |",
        "|---|---|---|---|---|",
    ]
    names = {
        "grid": "the full grid",
        "halving": "the same grid, `--pruner halving`",
        "search": "a search of 15 trials in the same ranges, the default",
        NEEDED: "the same search, until it is as good as the grid",
        UNTUNED: "`cadence`, one run without tuning",
    }
    for kind, name in names.items():
        each = [found[kind, seed] for seed in SEEDS if (kind, seed) in found]
        if not each:
            continue
        values = [record["best"] for record in each]
        counts = [len(record.get("trials", [0])) for record in each]
        trials = str(counts[0]) if len(set(counts)) == 1 else ", ".join(map(str, counts))
        cells = [
            name,
            ", ".join(f"{value:.4f}" for value in values),
            trials,
            f"{mean(record['client_updates'] for record in each):,.0f}{_saved(each, 'client_updates')}",
            f"{mean(record['processor'] for record in each):.0f} s{_saved(each, 'processor')}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _saved(each: list[dict[str, Any]], name: str) -> str:
    """The share of the full grid of the same seeds that is saved, in words."""
    if each[0]["kind"] == "grid":
        return ""
    found = records()
    whole = sum(found["grid", record["seed"]][name] for record in each)
    return f" (−{1 - sum(record[name] for record in each) / whole:.0%})"


def page() -> str:
    """README.md with the table of the records."""
    before, rest = PAGE.read_text().split("<!-- table -->")
    _, after = rest.split("<!-- end -->")
    return f"{before}<!-- table -->\n\n{table()}\n\n<!-- end -->{after}"


def main() -> None:
    """Run studies, or write the page."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--data-dir", help="the folder of Fashion-MNIST")
    arguments.add_argument("--write", action="store_true", help="write the table into README.md")
    arguments.add_argument("--most", type=int, metavar="N", help="run N studies at most")
    options = arguments.parse_args()
    if options.write:
        PAGE.write_text(page())
        return
    for kind, seed in [(kind, seed) for seed in SEEDS for kind in KINDS if (kind, seed) not in records()][
        : options.most
    ]:
        trials = None
        if kind == NEEDED:
            known = records()
            trials = trials_needed(known["search", seed], known["grid", seed]["best"])
            if trials is None:
                continue  # the search did not get there
        record = measure(kind, seed, options.data_dir, trials)
        with RECORDS.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(json.dumps({name: record[name] for name in record if name not in ("trials", "curve")}))


if __name__ == "__main__":
    main()
