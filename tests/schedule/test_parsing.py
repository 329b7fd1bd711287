"""Settings that are written as text: what cannot be read, or cannot be, is refused in one sentence."""

from collections.abc import Callable
from typing import Any

import pytest

from offbeat import InputError
from offbeat.aggregate.compression import parse_compression
from offbeat.aggregate.robust import parse_aggregate
from offbeat.schedule.availability import parse_availability
from offbeat.schedule.delays import parse_delay
from offbeat.schedule.staleness import parse_weights

REFUSALS: dict[Callable[[str], Any], list[tuple[str, str]]] = {  # by parser: the text, and what is said of it
    parse_delay: [
        ("exponental:1", "did you mean exponential"),
        ("tiers:mildly", "did you mean mild"),
        ("", "choose from"),
        ("constant", "constant:SECONDS"),
        ("constant:", "constant:SECONDS"),
        ("constant:1:2", "constant:SECONDS"),
        ("tiers", r"tiers:KIND\[:GAMMA\]"),
        ("recorded", "recorded:PATH"),
        ("constant:fast", "'fast' .* not a number"),
        ("constant:-1", "finite"),
        ("constant:inf", "finite"),
        ("constant:nan", "finite"),
        ("uniform:2:1", "upper end"),
        ("uniform:-1:1", "lower end"),
        ("half-normal:-1", "scale"),
        ("exponential:nan", "mean"),
        ("log-normal:0:-1", "sigma"),
        ("log-normal:1000:1", "overflows"),
        ("log-normal:nan:1", "overflows"),
        ("tiers:mild:0", "gamma"),
    ],
    parse_availability: [
        ("cycel:1:1", "cycle"),
        ("cycle:10", "cycle:PERIOD:SHARE"),
        ("cycle:0:0.5", "period"),
        ("cycle:1:0", "share"),
        ("cycle:1:1.5", "share"),
        ("cycle:1:nan", "share"),
        ("by-examples:0", "period"),
        ("by-classes:0:0.5", "period"),
        ("by-classes:1:0", "share"),
    ],
    parse_weights: [
        ("polynomal:1", "polynomial"),
        ("polynomial:-1", "exponent"),
        ("hinge:1:inf", "knee"),
        ("hinge:-1:1", "slope"),
        ("constant:1", "write it as constant"),
    ],
    parse_compression: [
        ("zip", "unknown compression 'zip'"),
        ("8bit:4", "8bit has no value"),
        ("topk", "write it as topk:SHARE"),
        ("topk:x", "write it as topk:SHARE"),
        ("topk:0", "top-k cannot send a share of 0 of the numbers"),
        ("topk:1.5", "top-k cannot send a share of 1.5 of the numbers"),
        ("topk:nan", "top-k cannot send a share of nan"),
    ],
    parse_aggregate: [
        ("trimmed-mean:0.5", "cannot leave out a share of 0.5 on each side"),
        ("trimmed-mean:-0.1", "cannot leave out a share of -0.1 on each side"),
        ("trimmed-mean:nan", "cannot leave out a share of nan"),
        ("trimmed-mean", "write it as trimmed-mean:SHARE"),
        ("krum", "unknown aggregation 'krum'"),
        ("norm-bound:0", "the bound on norms is 0.0: give a finite number above 0"),
        ("geometric-median:0", "give a finite number above 0"),
        ("geometric-median:1e-6:0", "needs a whole number of iterations above 0"),
    ],
}


@pytest.mark.parametrize(
    ("parse", "text", "sentence"),
    [(parse, text, sentence) for parse, refused in REFUSALS.items() for text, sentence in refused],
)
def test_a_text_that_names_nothing_possible_is_refused_in_a_sentence(
    parse: Callable[[str], Any], text: str, sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        parse(text)
