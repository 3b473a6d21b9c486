"""The wheel carries the kernel texts, and they are found however the package is installed."""

import json
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import mlx_tq

pytest.importorskip("hatchling")

ROOT = Path(__file__).parents[1]
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "kernels").glob("*.*")}
NEEDED = [str(Path(module.__file__).parents[1]) for module in (mx, np)]
LOOK = """
import json, site, sys
folder, names, needed = json.loads(sys.argv[1])
sys.modules["mlx_lm"] = None  # as if not installed
sys.path += needed
site.addsitedir(folder)
import mlx_tq
from mlx_tq import kernels
texts = {name: kernels.text(name) for name in names}
files = {"package": mlx_tq.__file__, "module": kernels.__file__}
print(json.dumps({"version": mlx_tq.__version__, "texts": texts, **files}))
"""


def build(kind: str, folder: Path) -> Path:
    """A distribution, made by the build back end as pip would with --no-build-isolation."""
    code = f"import sys; from hatchling.build import build_{kind}; print(build_{kind}(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return folder / done.stdout.split()[-1]


def look(folder: Path, cwd: Path) -> dict:
    """What a Python without mlx-lm finds in the site folder `folder`."""
    arguments = json.dumps([str(folder), list(TEXTS), NEEDED])
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # -S keeps the environment's own mlx-tq out; what is needed of it is named.
    command = [sys.executable, "-S", "-c", LOOK, arguments]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def install(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.mark.parametrize("way", ["installed", "editable", "checkout"])
def test_kernel_texts_are_found(way, wheel, tmp_path):
    if way == "editable":
        wheel = build("editable", tmp_path)
    folder = ROOT if way == "checkout" else install(wheel, tmp_path / "site")
    found = look(folder, tmp_path)
    home = folder if way == "installed" else ROOT
    assert Path(found["package"]) == home / "mlx_tq" / "__init__.py"
    # The wheel has a folder of that name beside it: the module must win.
    assert Path(found["module"]) == home / "mlx_tq" / "kernels.py"
    assert found["texts"] == TEXTS
    assert found["version"] == mlx_tq.__version__


def test_wheel_has_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names} == {"mlx_tq", f"mlx_tq-{mlx_tq.__version__}.dist-info"}
    assert "mlx_tq/kernels/__init__.py" not in names  # it would hide kernels.py
    assert not [name for name in names if "__pycache__" in name]


def test_sdist_can_be_built_and_tested(tmp_path):
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"kernels/{name}" for name in TEXTS} <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "Makefile", "tests/test_packaging.py"} <= names
    assert "docs/architectures.md" in names  # which a test compares


def test_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == mlx_tq.__version__
