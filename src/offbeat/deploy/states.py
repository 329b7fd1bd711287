"""Where things are kept that outlive a command."""

import os
from pathlib import Path


def site_folder(name: str) -> Path:
    """The folder of one of this user's sites."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "offbeat" / "sites" / name
