"""The terms of secure sums as JSON, for parties that are not in one process."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from offbeat.errors import InputError
from offbeat.privacy.secure.terms import Terms
from offbeat.schedule.staleness import Weights, parse_weights

NUMBERS = ("length", "most", "minimum", "bits", "weight_bits")
NAMES = ("run", *NUMBERS, "weights")
_MOST = 1 << 62  # of a whole number
_RUN = re.compile(r"(?:[0-9a-f]{2}){1,255}")
_RULE = re.compile(r"[a-z]{1,20}(?::[0-9.e+-]{1,30}){0,2}")


def write_terms(terms: Terms) -> dict[str, Any]:
    """What `read_terms` reads."""
    return {
        "run": terms.run.hex(),
        **{name: getattr(terms, name) for name in NUMBERS},
        "weights": terms.rule,
    }


def read_terms(told: dict[str, Any]) -> Terms:
    """The terms that a stranger names, if they are terms and hide anything; the rest is left alone."""
    for name in NUMBERS:
        number = told.get(name)
        if type(number) is not int or not 0 <= number < _MOST:
            raise InputError(f"the terms of a secure sum need a whole number as {name}.")
    run, rule = told.get("run"), told.get("weights")
    if type(run) is not str or not _RUN.fullmatch(run):
        raise InputError("the terms of a secure sum need the name of a run, in hexadecimal digits.")
    if type(rule) is not str or not _RULE.fullmatch(rule):
        raise InputError("the terms of a secure sum need a rule of weights, such as polynomial:0.5.")
    weigh = parse_weights(rule)
    if str(weigh) != rule:
        raise InputError(f"the terms of a secure sum have weights {rule}, which are written {weigh}.")
    length, most, minimum, bits, weight_bits = (told[name] for name in NUMBERS)
    return Terms(bytes.fromhex(run), length, most, minimum, bits, weight_bits, weigh, rule)


def clipping_of(bounds: Mapping[str, float] | None, moving: Sequence[str] = ()) -> str:
    """What `Terms.clipping` is where clients clip to these bounds; empty where they do not clip."""
    if bounds is None:
        return ""
    told = [sorted((name, float(bound).hex()) for name, bound in bounds.items()), list(moving)]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def rule_of(weights: Weights) -> str:
    """Weights in words, which others can read."""
    try:
        if parse_weights(str(weights)) == weights:
            return str(weights)
    except InputError:
        pass
    raise InputError(
        "secure sums over a network need weights that have a name: use constant, polynomial or hinge."
    )
