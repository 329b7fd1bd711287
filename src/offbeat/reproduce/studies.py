"""Every study, by name."""

from collections.abc import Mapping
from types import MappingProxyType

from offbeat.errors import unknown
from offbeat.reproduce import adamasfl, fadas, fadas_fig1, language, momentum, padamfed
from offbeat.reproduce.study import Study

STUDIES: Mapping[str, Study] = MappingProxyType(
    {
        study.name: study
        for study in (
            adamasfl.FIG1,
            adamasfl.FIG2,
            fadas.TABLE2,
            fadas.TABLE4,
            fadas.TABLE7,
            fadas_fig1.FIG1,
            language.GLUE,
            momentum.TABLE2,
            padamfed.FIG1,
            padamfed.FIG2,
        )
    }
)


def find(name: str) -> Study:
    """The study of that name."""
    if name not in STUDIES:
        raise unknown("study", name, STUDIES)
    return STUDIES[name]
