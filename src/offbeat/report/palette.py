"""How runs are told apart: colours that the colour-blind can tell (Okabe and Ito), dashes and marks."""

from typing import NamedTuple

RUNS = 12  # that one page can show
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_DARK = ("#56b4e9", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#f0e442")
_DASHES = ("", "7 3", "2 3", "9 3 2 3")


class Theme(NamedTuple):
    """Colours of what is not a run."""

    ground: str
    ink: str
    soft: str
    rail: str


LIGHT = Theme("#ffffff", "#1b1f24", "#57606a", "#e3e7eb")
DARK = Theme("#161b22", "#e6edf3", "#9aa4af", "#2d343d")


def dash(style: int) -> str:
    """The dashes of a run's lines; empty: none."""
    return _DASHES[style % len(_DASHES)]


def colour(style: int) -> str:
    """The class of a run's colour."""
    return f"c{style % len(_COLOURS)}"


def rules(theme: Theme, colours: tuple[str, ...] = _COLOURS) -> str:
    """The style of what is drawn."""
    runs = "".join(f".c{n}{{stroke:{each};fill:{each}}}" for n, each in enumerate(colours))
    return (
        f"{runs}text{{fill:{theme.soft};stroke:none;font-size:12px}}"
        f"text.name{{fill:{theme.ink}}}"
        f".grid{{stroke:{theme.rail}}}.axis{{stroke:{theme.soft}}}"
        f".leader{{stroke:{theme.soft};stroke-dasharray:1 2}}"
        ".line{fill:none;stroke-width:2;stroke-linejoin:round}"
        ".band{stroke:none;fill-opacity:.08}.edge{stroke-width:.9;stroke-opacity:.7}"
        f".ground{{fill:{theme.ground}}}"
    )


def dark_rules() -> str:
    """The same on a dark ground."""
    return rules(DARK, _DARK)
