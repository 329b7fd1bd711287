"""Time that commands take to start, beside Python's own start: `python benchmarks/start.py`."""

import argparse
import statistics
import subprocess
import sys
import time

COMMANDS = (
    "python -c pass",
    "python -m offbeat --help",
    "python -m offbeat --version",
    "python -m offbeat run --help",
    "python -m offbeat algorithms",
    "python -m offbeat schedule --rounds 10",
    "python -m offbeat privacy --noise 1 --delta 1e-6 --max-participations 3",
)


def seconds(command: str) -> float:
    """The wall time of one call."""
    begun = time.perf_counter()
    subprocess.run([sys.executable, *command.split()[1:]], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begun


def main() -> None:
    """Time each command in turn, several times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7, metavar="N")
    given = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(given.repeats):
        for command in COMMANDS:
            times[command].append(seconds(command))
    for name, found in times.items():
        print(f"{statistics.median(found):.3f} s (least {min(found):.3f} s): {name}")


if __name__ == "__main__":
    main()
