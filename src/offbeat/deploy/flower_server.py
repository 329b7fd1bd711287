"""The server's half as a Flower app."""

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from offbeat.deploy.flower_post import FlowerPost
from offbeat.deploy.server import Ask, serve
from offbeat.errors import InputError
from offbeat.folder import claim

_LOG = logging.getLogger("offbeat")
_THREADS = 4  # at most: between two steps there is nothing to do for them


def server_app() -> ServerApp:
    """Runs what `settings`, `folder` and `resume` of its run config name."""
    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        torch.set_num_threads(min(_THREADS, torch.get_num_threads()))
        ask = ask_of(context.run_config)
        _log_to(ask.folder / "server.log")
        try:
            outcome = serve(ask, lambda most: FlowerPost(grid, most))
        except Exception:
            _LOG.exception("the server failed")
            raise
        if outcome.error is not None:
            _LOG.error("%s", outcome.error)

    return app


def ask_of(config: Mapping[str, Any]) -> Ask:
    """A relative settings file is looked for beside the app first, and then here; no folder: a new one."""
    named = Path(str(config.get("settings") or "serve.toml")).expanduser()
    places = [Path(place) / named for place in (*sys.path, ".")]
    settings = next((place for place in places if place.is_file()), named)
    folder, resume = str(config.get("folder") or ""), bool(config.get("resume", False))
    if resume and not folder:
        raise InputError("resume needs folder, that of the run to go on with: give both.")
    place = Path(folder).expanduser() if folder else claim(Path("runs"), "serve")
    sites = str(config.get("sites") or "")
    return Ask(
        settings.absolute(),
        place.absolute(),
        resume,
        bool(config.get("authenticated", False)),
        Path(sites) if sites else None,
    )


def _log_to(path: Path) -> None:
    """Flower throws away what its apps print."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    _LOG.addHandler(handler)
    _LOG.setLevel(logging.INFO)
