"""Former names of settings and record fields: the only place that knows them.

An option or a key with a former name is rejected in a sentence that gives the present one. The settings
and records of earlier runs are read as if they had been written with the present names.
"""

import re
from collections.abc import Mapping
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
RECORD_FIELDS: Mapping[str, str] = MappingProxyType({"trips": "client_updates"})


def check_name(name: str, place: str = "") -> None:
    """Reject the former name of a setting; `place` is added to the sentence, such as " of [training]"."""
    if name in SETTINGS:
        raise InputError(f"{setting_name(name)}{place} is now called {setting_name(SETTINGS[name])}.")


def present_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of an earlier version under their present names."""
    return {
        SETTINGS.get(name, name): value
        for name, value in settings.items()
        if SETTINGS.get(name, name) == name or SETTINGS[name] not in settings
    }


def present_command(text: str) -> str:
    """A command of an earlier version with the present names of its options."""
    return re.sub(r"(?<![\w-])--([a-z-]+)", lambda word: f"--{_present_option(word[1])}", text)


def _present_option(option: str) -> str:
    return SETTINGS.get(option.replace("-", "_"), option).replace("_", "-")


def present_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record of an earlier run under its present names."""
    return {RECORD_FIELDS.get(name, name): value for name, value in record.items()}
