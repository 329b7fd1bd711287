"""Runs each variant of grid.json on its settings, by default Fashion-MNIST under several concurrencies.

A cell that has a record in exploration.jsonl is left out, so a run that was cut short goes on; `--grid` and
`--records` name other files, as the thirteenth exploration has. An entry of the grid is a method, its words
and, where they are not the default ones, its settings. `a` and `b` in the words of a variant stand for the
rates a / (K sqrt(T)) and b (SK)^(1/4) / T^(3/4), `reach` and `walk` for K and sqrt(K) times the local rate,
`leap` for the cap by K times the local rate, and `noise` for the server's rate by sqrt(SK / T).
"""

import json
from pathlib import Path
from typing import Any

from experiments.tuning_free.runs import options, spread

HERE = Path(__file__).parent
RECORDS, GRID = HERE / "exploration.jsonl", HERE / "grid.json"
SETTINGS: list[dict[str, Any]] = [
    {"dirichlet": dirichlet, "concurrency": concurrency}
    for dirichlet, concurrency in ((0.5, 20), (0.5, 60), (0.5, 90), (0.1, 20), (0.1, 60))
]


def main() -> None:
    """What is not recorded yet."""
    parser = options(__doc__)
    parser.add_argument("--grid", type=Path, default=GRID)
    parser.add_argument("--records", type=Path, default=RECORDS)
    given = parser.parse_args()
    grid = [
        {"method": kind, "words": words} | setting
        for kind, words, *settings in json.loads(given.grid.read_text())
        for setting in (settings[0] if settings else SETTINGS)
    ]
    spread(grid, given.records, given)


if __name__ == "__main__":
    main()
