"""Every study, by name."""

from collections.abc import Mapping
from types import MappingProxyType

from experiments.reproduce.study import Study
from experiments.studies import (
    adamasfl,
    fadas,
    fadas_authors,
    fadas_fig1,
    language,
    momentum,
    momentum_gap,
    padamfed,
)
from offbeat.errors import unknown_name

STUDIES: Mapping[str, Study] = MappingProxyType(
    {
        study.name: study
        for study in (
            adamasfl.FIG1,
            adamasfl.FIG2,
            adamasfl.MAP,
            fadas.TABLE2,
            fadas.TABLE4,
            fadas.TABLE7,
            fadas_fig1.FIG1,
            fadas_authors.CORNERS,
            fadas_authors.TABLE2,
            fadas_authors.TABLE8,
            fadas_authors.TABLE4,
            language.GLUE,
            language.SMALL,
            momentum_gap.TABLE1,
            momentum.TABLE2,
            momentum.SCALE,
            padamfed.FIG1,
            padamfed.FIG2,
        )
    }
)


def find_study(name: str) -> Study:
    """The study of that name."""
    if name not in STUDIES:
        raise unknown_name("study", name, STUDIES)
    return STUDIES[name]
