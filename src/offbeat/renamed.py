"""Former names of settings, record fields and modules, and settings that are gone.

An option, a key or a module with a former name is rejected in a sentence that gives the present one. The
settings and records of earlier runs are read as if they had been written with the present names.
"""

import re
from collections.abc import Mapping
from importlib.abc import MetaPathFinder
from types import MappingProxyType
from typing import Any

from offbeat.errors import InputError, setting_name

SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        "limit": "max_staleness",
        "every": "eval_every",
        "average": "ema_decay",
        "how": "execution",
        "most": "max_participations",
        "apart": "min_separation",
        "noise_shape": "noise_correlation",
        "amplified": "simulate_amplification",
        "most_bytes": "max_upload_bytes",
        "most_norm": "max_update_norm",
        "bound": "bind_names",
    }
)
REMOVED: Mapping[str, str] = MappingProxyType(  # and why
    {
        "superlink": "'offbeat serve' starts a SuperLink of its own, where sites connect",
        "poll": "the server is told when an upload has arrived",
    }
)
_NO_CLIENT_APP = "is gone, since a site needs no ClientApp: start the site with 'offbeat join'"
_NO_SERVER_APP = "is gone, since a run needs no ServerApp: start the run with 'offbeat serve'"
MODULES: Mapping[str, str] = MappingProxyType(
    {
        "offbeat.deploy.flower_client": _NO_CLIENT_APP,
        "offbeat.deploy.flower.client": _NO_CLIENT_APP,
        "offbeat.deploy.flower_server": _NO_SERVER_APP,
        "offbeat.language": "is now offbeat.nn.language, where classifier_in is now load_classifier, "
        "learn_tokenizer is now train_tokenizer and tokenizer_in is now load_tokenizer",
    }
)
VALUES: Mapping[str, Mapping[str, str]] = MappingProxyType(  # of settings, by the setting's present name
    {
        "precision": {"torch": "auto"},
        "execution": {"columns": "mapped", "eager": "mapped", "compiled": "streamed-compiled"},
    }
)
PARTS_OF_TASK = frozenset({"data", "module", "losses", "test"})  # each was given by itself
RECORD_FIELDS: Mapping[str, str] = MappingProxyType({"trips": "client_updates"})
_AGGREGATORS = {  # classes and fields in the `repr` of an aggregator, which checkpoints contain
    "Independent": "IndependentNoise",
    "Banded": "BandedNoise",
    "Tree": "TreeNoise",
    "Pld": "PldAccountant",
    "Rdp": "RdpAccountant",
    "Quantile": "AdaptiveClipping",
    "Distant": "RemoteSecure",
    "amplified": "simulate_amplification",
    "most": "max_participations",
    "apart": "min_separation",
}


class FormerModules(MetaPathFinder):
    """Answers the import of a former module with a sentence that names the present one."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Raise for a former module; called for modules that no other finder knows."""
        if name in MODULES:
            raise ModuleNotFoundError(f"the module {name} {MODULES[name]}.", name=name)


def check_name(name: str, place: str = "") -> None:
    """Reject a former setting; `place` is added to the sentence, such as " of [training]"."""
    if name in REMOVED:
        raise InputError(f"{setting_name(name)}{place} is gone, since {REMOVED[name]}: leave it out.")
    if name in SETTINGS:
        raise InputError(f"{setting_name(name)}{place} is now called {setting_name(SETTINGS[name])}.")


def check_part_of_task(name: str, place: str, present: str) -> None:
    """Reject a part of a task that is given by itself; `present` is the setting that gives the whole task."""
    if name in PARTS_OF_TASK:
        raise InputError(
            f"{setting_name(name)}{place} is now a part of the task: give {setting_name(present)}{place}, "
            "package.module:function, which returns an offbeat.LearningTask."
        )


def check_value(name: str, value: object) -> None:
    """Reject the former name of a value of a setting."""
    if value in VALUES.get(name, {}):
        raise InputError(f"{setting_name(name)} {value} is now called {VALUES[name][str(value)]}.")


def present_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of an earlier version under the present names of settings and values."""
    found = {
        SETTINGS.get(name, name): value
        for name, value in settings.items()
        if SETTINGS.get(name, name) == name or SETTINGS[name] not in settings
    }
    former = {name: value for name, value in found.items() if name in VALUES and isinstance(value, str)}
    return found | {name: VALUES[name].get(value, value) for name, value in former.items()}


def present_command(text: str) -> str:
    """A command of an earlier version with the present names of its options."""
    return re.sub(r"(?<![\w-])--([a-z-]+)", lambda word: f"--{_present_option(word[1])}", text)


def _present_option(option: str) -> str:
    return SETTINGS.get(option.replace("-", "_"), option).replace("_", "-")


def present_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record of an earlier run under its present names."""
    return {RECORD_FIELDS.get(name, name): value for name, value in record.items()}


def current_repr(text: str) -> str:
    """The `repr` of an aggregator in a checkpoint of an earlier version, with the present names."""
    current = re.sub(r"\b(\w+)(?=[(=])", lambda found: _AGGREGATORS.get(found[1], found[1]), text)
    if current.startswith("Private(") and "noise_source=" not in current:
        return f"{current[:-1]}, noise_source='server')"
    return current
