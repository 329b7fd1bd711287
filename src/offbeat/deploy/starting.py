"""What is checked of a run's folder before anything is started in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from offbeat import settings
from offbeat.deploy.plan import Plan
from offbeat.errors import InputError
from offbeat.folder import check_free


def check_folder(folder: Path | None, resume: bool, plan: Plan) -> None:
    """Refuse a folder that has no run to go on with, or one of other settings, or one not asked for."""
    if folder is None:
        if resume:
            raise InputError("--resume needs --out, the folder of the run to go on with.")
        return
    if not resume:
        if (folder / "settings.json").exists():
            raise InputError(f"{folder} holds a run already: name another --out, or add --resume.")
        check_free(folder)
        return
    if (folder / "settings.json").exists():  # else it was stopped before its first site came
        known, now = settings.read(folder), plan.settings()
        different = [
            f"{name} was {known.get(name)} and is now {now[name]}"
            for name in now
            if known.get(name) != now[name]
        ]
        if "task" not in known:
            raise InputError(f"the run in {folder} is a simulation: go on with it by 'offbeat run'.")
        if different:
            raise InputError(
                f"{folder} was begun with other settings ({'; '.join(different)}): "
                "put them back to resume it, or name another --out."
            )
    elif not (folder / "flower").is_dir():
        raise InputError(f"{folder} holds no run to resume: leave out --resume to start one there.")


def resumed_noise(folder: Path) -> float | None:
    """What an earlier start of the run came to."""
    if not (folder / "settings.json").exists():
        return None
    noise = settings.read(folder).get("resolved", {}).get("noise")
    return None if noise is None else float(noise)


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """One command at a time sees to a folder."""
    own = folder / "flower"
    own.mkdir(mode=0o700, parents=True, exist_ok=True)  # the SuperLink's database holds updates as they come
    lock = FileLock(own / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise InputError(
            f"another 'offbeat serve' sees to {folder}: wait for it, or name another --out."
        ) from None
    try:
        yield
    finally:
        lock.release()
