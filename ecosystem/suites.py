# SPDX-License-Identifier: Apache-2.0
"""The libraries' own test suites, with graftax's names in place of theirs: what passes with their own names alone.

    python ecosystem/suites.py [SUITE ...] [--jit] [--checkout FOLDER] [-- PYTEST ARGUMENTS]

Each suite is that of the installed version, cloned at its tag, and runs in two processes. What fails in the second
alone is listed by its cause: its message without numbers. The suites of libraries that have no transforms of their own
run with `jax.jit` replaced, by the plugin that users have (`pytest -p graftax.replace`).
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent


class Suite(NamedTuple):
    """Where a library keeps its tests."""

    repository: str
    tests: str  # arguments of pytest, in the folder of the repository
    package: str
    names: str = "equinox"  # what is replaced: `jit` is `jax.jit` itself
    tag: str = "v{}"


_HAIKU = (
    "base basic data_structures dot eval_shape filtering initializers jaxpr_info lift module multi_transform random"
)
_HAIKU += " recurrent stateful summarise transform"
_API = "APITest JaxprTest NamedCallTest RematTest"

SUITES = {
    "equinox": Suite("patrick-kidger/equinox", "tests", "equinox"),
    "lineax": Suite("patrick-kidger/lineax", "tests", "lineax"),
    "optimistix": Suite("patrick-kidger/optimistix", "tests", "optimistix"),
    "diffrax": Suite("patrick-kidger/diffrax", "test", "diffrax"),
    "flowjax": Suite("danielward27/flowjax", "tests", "flowjax"),
    "paramax": Suite("danielward27/paramax", "tests", "paramax"),
    "nnx": Suite("google/flax", "tests/nnx", "flax", names="nnx"),
    "jax": Suite("jax-ml/jax", "tests/api_test.py -k JitTest", "jax", "jit", "jax-v{}"),
    "jax-api": Suite(
        "jax-ml/jax", " ".join(f"tests/api_test.py::{name}" for name in _API.split()), "jax", "jit", "jax-v{}"
    ),
    "jax-refs": Suite("jax-ml/jax", "tests/mutable_array_test.py", "jax", "jit", "jax-v{}"),
    "jax-callbacks": Suite("jax-ml/jax", "tests/python_callback_test.py", "jax", "jit", "jax-v{}"),
    "jax-checkify": Suite("jax-ml/jax", "tests/checkify_test.py", "jax", "jit", "jax-v{}"),
    "jax-nans": Suite("jax-ml/jax", "tests/debug_nans_test.py", "jax", "jit", "jax-v{}"),
    "jax-export": Suite("jax-ml/jax", "tests/export_test.py", "jax", "jit", "jax-v{}"),
    "optax": Suite("google-deepmind/optax", "optax", "optax", "jit"),
    "rlax": Suite("google-deepmind/rlax", "rlax", "rlax", "jit"),
    "mctx": Suite("google-deepmind/mctx", "mctx", "mctx", "jit"),
    "chex": Suite("google-deepmind/chex", "chex", "chex", "jit"),
    "distrax": Suite("google-deepmind/distrax", "distrax/_src/utils distrax/_src/bijectors", "distrax", "jit"),
    "haiku": Suite(
        "google-deepmind/dm-haiku", " ".join(f"haiku/_src/{n}_test.py" for n in _HAIKU.split()), "dm-haiku", "jit"
    ),
    "jraph": Suite("google-deepmind/jraph", "jraph/_src", "jraph", "jit"),
    "evosax": Suite("RobertTLange/evosax", "tests/test_core", "evosax", "jit"),
    "gymnax": Suite("RobertTLange/gymnax", "tests --ignore=tests/test_visualizer.py", "gymnax", "jit"),
    "numpyro": Suite(
        "pyro-ppl/numpyro",
        "test/infer/test_hmc_util.py test/infer/test_svi.py test/test_handlers.py",
        "numpyro",
        "jit",
        "{}",
    ),
    "brainstate": Suite(
        "chaobrain/brainstate", "brainstate/graph brainstate/transform/_jit_test.py", "brainstate", "jit"
    ),
    "penzai": Suite("google-deepmind/penzai", "tests/core", "penzai", "jit"),
    "haliax": Suite("stanford-crfm/haliax", "tests", "haliax", "jit"),
    "blackjax": Suite("blackjax-devs/blackjax", "tests/test_compilation.py tests/mcmc", "blackjax", "jit", "{}"),
    "tinygp": Suite("dfm/tinygp", "tests", "tinygp", "jit"),
}

# How many tests of a suite differ, by README.md, which has the cause of each. One more than that is a failure.
KNOWN = {"nnx": 128, "jax": 13, "jax-api": 8, "jax-refs": 6, "jax-checkify": 1, "distrax": 1, "optax": 1}


def cloned(suite: Suite, into: Path) -> Path:
    """The repository as it was when the installed version was released."""
    tag = suite.tag.format(importlib.metadata.version(suite.package))
    url = f"https://github.com/{suite.repository}"
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", "--branch", tag, url, str(into)], check=True)
    return into


def outcomes(checkout: Path, tests: list[str], names: str) -> dict[str, str | None]:
    """What each test that passed or failed came to: None, or the first line of its error."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", f"--junitxml={report}"]
        path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "GRAFTAX_NAMES": names}
        plugin = "graftax.replace" if names == "jit" else "replaced_names"
        ended = subprocess.run(
            [*command, "--continue-on-collection-errors", "-p", plugin, *tests],
            cwd=checkout,
            env=environment,
            check=False,
        )
        if ended.returncode not in (0, 1):
            raise RuntimeError(f"pytest ended with {ended.returncode} in {checkout}")
        return dict(_read(report))


def _read(report: Path) -> list[tuple[str, str | None]]:
    cases: list[tuple[str, str | None]] = []
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is not None:
            continue
        parts = [part for part in (case.find("failure"), case.find("error")) if part is not None]
        text = (parts[0].get("message") or "").strip() if parts else None
        cases.append((f"{case.get('classname')}::{case.get('name')}", text and text.splitlines()[0]))
    return cases


def cause(message: str) -> str:
    return re.sub(r"0x[0-9a-f]+|\d+", "N", message)[:160]


def compare(name: str, checkout: Path, names: str, more: list[str]) -> int:
    """Prints a table of causes. Returns how many tests fail."""
    tests = [*SUITES[name].tests.split(), *more]
    own = outcomes(checkout, tests, "")
    ours = outcomes(checkout, tests, names)
    good = [test for test, error in own.items() if error is None]
    failed = {test: error or "not run" for test in good if (error := ours.get(test, "not run")) is not None}
    print(f"{name}: {len(good) - len(failed)} of {len(good)} pass that pass with its own names", flush=True)
    by_cause: dict[str, list[str]] = collections.defaultdict(list)
    for test in failed:
        by_cause[cause(failed[test])].append(test)
    for text, there in sorted(by_cause.items(), key=lambda item: -len(item[1])):
        print(f"  {len(there):4}  {text}  ({min(there)})", flush=True)
    return len(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suites", nargs="*", default=[*SUITES])
    parser.add_argument("--jit", action="store_true", help="replace filter_jit alone")
    parser.add_argument("--checkout", type=Path, help="the repository of the one suite, in place of a clone")
    given, more = parser.parse_known_args()
    failed = 0
    for name in given.suites:
        names = "filter_jit" if given.jit and SUITES[name].names == "equinox" else SUITES[name].names
        more = [argument for argument in more if argument != "--"]
        with tempfile.TemporaryDirectory() as folder:
            checkout = given.checkout.resolve() if given.checkout is not None else None
            try:
                differing = compare(name, checkout or cloned(SUITES[name], Path(folder) / name), names, more)
            except (importlib.metadata.PackageNotFoundError, subprocess.CalledProcessError, RuntimeError) as error:
                print(f"{name}: could not be run: {error}", flush=True)
                failed += 1
                continue
        failed += max(0, differing - KNOWN.get(name, 0))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
