# SPDX-License-Identifier: Apache-2.0
"""What users are given, made as they get it: `make supply`.

The sdist and its wheel are made twice, in other folders, and are the same bytes; the wheel is built without a network.
Then it is installed in an environment of its own, where tests from the sdist run. They stay in build/supply.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "support"))
from records import record  # noqa: E402

KEPT = ROOT / "build" / "supply"
TESTS = ["project/test_package.py", "jit/test_jit.py", "graph/test_path.py", "export/test_export.py", "io"]
SDIST = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
NEEDED = ("LICENSE", "README.md", "pyproject.toml", "CMakeLists.txt", "core/module.cpp", "tests/jit/test_jit.py")
ALONE = ["unshare", "--map-root-user", "--net"]  # a network of its own, with nobody in it


def run(*command: str | Path, **options: object) -> None:
    subprocess.run(list(map(str, command)), check=True, **options)  # type: ignore[call-overload]


def parts(archive: Path) -> dict[str, bytes]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as file:
            return {name: file.read(name) for name in file.namelist()}
    with tarfile.open(archive) as file:
        return {m.name.partition("/")[2]: file.extractfile(m).read() for m in file if m.isfile()}  # type: ignore[union-attr]


def compared(one: Path, other: Path) -> list[str]:
    """What makes two archives other bytes."""
    if one.name == other.name and one.read_bytes() == other.read_bytes():
        return []
    a, b = parts(one), parts(other)
    differing = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
    return [f"{one.name} has other bytes each time: {', '.join(differing) or 'its own fields'}"]


def built(folder: Path) -> tuple[Path, Path]:
    """An sdist and its wheel."""
    run(sys.executable, "-c", SDIST, folder, cwd=ROOT, stdout=subprocess.DEVNULL)
    sdist = next(folder.glob("*.tar.gz"))
    alone = ["--no-deps", "--no-index", "--no-build-isolation", "--no-cache-dir"]
    environment = {**os.environ, "TMPDIR": str(folder)}
    run(*ALONE, sys.executable, "-m", "pip", "wheel", "--quiet", *alone, "-w", folder, sdist, env=environment)
    return sdist, next(folder.glob("*.whl"))


def main() -> int:
    begin = time.monotonic()
    seconds = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True).stdout
    os.environ["SOURCE_DATE_EPOCH"] = seconds.strip() or "0"
    with tempfile.TemporaryDirectory(prefix="one ") as one, tempfile.TemporaryDirectory(prefix="an other ") as other:
        (sdist, wheel), again = built(Path(one)), built(Path(other))
        findings = compared(sdist, again[0]) + compared(wheel, again[1])
        inside = parts(sdist)
        findings += [f"{sdist.name} lacks {name}" for name in NEEDED if name not in inside]
        fresh = Path(one) / "fresh"
        run(sys.executable, "-m", "venv", fresh)
        python = fresh / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", f"{wheel}[test]")
        with tarfile.open(sdist) as file:
            file.extractall(other, filter="data")
        shutil.rmtree(KEPT, ignore_errors=True)
        KEPT.mkdir(parents=True)
        for path in (sdist, wheel):
            shutil.copy(path, KEPT)
        tests = Path(other, sdist.name.removesuffix(".tar.gz"))
        done = subprocess.run([python, "-m", "pytest", "--quick", "-q", *(f"tests/{x}" for x in TESTS)], cwd=tests)
        if done.returncode:
            findings.append(f"the tests of the installed wheel end with {done.returncode}")
    tried = f"an sdist of {len(inside)} files and a wheel, each made twice; {', '.join(TESTS)} on the wheel"
    record("supply", "make supply", f"{tried}, in {time.monotonic() - begin:.0f} seconds", findings)
    print(tried, *findings, sep="\n")
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main())
