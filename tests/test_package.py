"""The wheel and the source distribution: what is in them, and that the wheel alone runs."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "offbeat"
pytestmark = pytest.mark.slow

# Only the dependencies of the package itself can be imported, not those of its extras.
WITHOUT_EXTRAS = """
from importlib.machinery import PathFinder
EXTRAS = {"flwr", "msgspec", "uvicorn", "starlette", "httpx", "prometheus_client", "ray", "resvg_py", "wandb"}
EXTRAS |= {"transformers", "peft", "tokenizers", "mlflow", "pandas", "polars", "datasets", "torchmetrics"}
EXTRAS |= {"optuna"}
found = PathFinder.find_spec


def find_spec(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in EXTRAS else found(name, path, target)


PathFinder.find_spec = classmethod(find_spec)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def clean(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that has offbeat from the wheel alone, and sees what offbeat depends on.

    The folder of this environment's packages is on its path, but the link in it that leads to the checkout
    is not followed.
    """
    place = tmp_path_factory.mktemp("clean") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    install = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python")]
    subprocess.run([*install, "install", "-q", "--no-deps", "--no-index", str(built[1])], check=True)
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (packages / "sitecustomize.py").write_text(WITHOUT_EXTRAS)
    return place / "bin"


def call(program: Path, *words: str, folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(program), *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    files = [path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert names == {f"offbeat/{path.relative_to(SOURCE).as_posix()}" for path in files}


def test_the_source_distribution_has_what_it_takes_to_test_and_to_build(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    wanted = ["pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt", "docs/index.md"]
    wanted += ["src/offbeat/py.typed", "tests/test_house.py", "examples/hospitals.py", ".ci/run"]
    assert [name for name in wanted if name not in names] == []
    assert not [name for name in names if "__pycache__" in name or name.startswith("runs/")]


def test_the_metadata_is_valid_and_shows_the_readme(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        found = Metadata.from_email(wheel.read(name), validate=True)
    assert (found.name, found.description_content_type) == ("offbeat", "text/markdown")
    assert found.description == (ROOT / "README.md").read_text()
    assert found.license_expression == "Apache-2.0"


def test_the_wheel_alone_runs_reports_and_writes_an_app(clean: Path, tmp_path: Path) -> None:
    place = call(clean / "python", "-c", "import offbeat; print(offbeat.__file__)", folder=tmp_path)
    assert Path(place).is_relative_to(clean.parent)
    offbeat = clean / "offbeat"
    short = ("--clients", "12", "--concurrency", "6", "--buffer", "3", "--rounds", "4")
    call(offbeat, "run", *short, "--out", "run", folder=tmp_path)
    call(offbeat, "report", "run", folder=tmp_path)
    assert "<svg" in (tmp_path / "report.html").read_text()
    call(offbeat, "new", "first-try", folder=tmp_path)
    call(offbeat, "run", "--task", "first_try.task:task", "--rounds", "2", folder=tmp_path / "first-try")
    assert (tmp_path / "first-try" / "runs").is_dir()
    call(offbeat, "replay", "run", folder=tmp_path)
    serve = [str(offbeat), "serve", "serve.toml"]
    done = subprocess.run(serve, cwd=tmp_path / "first-try", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "is not installed: install 'offbeat[deploy]'." in done.stderr
