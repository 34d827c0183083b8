# SPDX-License-Identifier: Apache-2.0
"""Programs of other libraries, with their own transforms and with graftax's in their place: equal results.

    python ecosystem/run.py [LIBRARY ...] [-k WORD]

Each program runs in two processes. In the second, the names that a library calls are graftax's, replaced before it is
imported. What a program returns is compared, array by array.
"""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LIBRARIES = ("lineax", "optimistix", "diffrax", "flowjax", "paramax", "mixed", "equinox", "nnx", "nnx_trainings")


def replace_names() -> None:
    """Puts graftax's transforms where Equinox has its own. Programs of NNX choose by themselves: its names differ."""
    import equinox

    import graftax

    for name in dir(graftax):
        if name.startswith("filter_") and hasattr(equinox, name):
            setattr(equinox, name, getattr(graftax, name))


def programs_of(library: str) -> dict[str, Any]:
    sys.path.insert(0, str(HERE / "programs"))
    return __import__(f"of_{library}").PROGRAMS


def run_all(library: str, replaced: bool, word: str) -> dict[str, Any]:
    """What each program returned: its arrays, or the text of its error."""
    import jax
    import numpy as np

    if replaced:
        replace_names()
    found: dict[str, Any] = {}
    for name, program in programs_of(library).items():
        if word not in name:
            continue
        try:
            leaves = jax.tree.leaves(program())
            found[name] = [np.asarray(x) for x in leaves if hasattr(x, "dtype") or isinstance(x, (int, float))]
        except Exception as error:
            if os.environ.get("ECOSYSTEM_TRACEBACK"):
                traceback.print_exc()
            found[name] = f"{type(error).__name__}: {str(error).strip()[:1500]}"
    return found


def outcomes(library: str, word: str) -> tuple[dict[str, Any], dict[str, Any]]:
    both: list[dict[str, Any]] = []
    for replaced in (False, True):
        with tempfile.NamedTemporaryFile(suffix=".pkl") as file:
            command = [sys.executable, __file__, library, "--into", file.name, "-k", word]
            environment = {**os.environ, "GRAFTAX_ECOSYSTEM": "replaced" if replaced else "own"}
            subprocess.run([*command, *["--replaced"] * replaced], check=True, env=environment)
            both.append(pickle.loads(Path(file.name).read_bytes()))
    return both[0], both[1]


def difference(own: Any, ours: Any) -> str | None:
    """Where two runs of a program differ. One that fails by itself says nothing of graftax."""
    import numpy as np

    if isinstance(own, str):
        return f"fails by itself: {own}"
    if isinstance(ours, str):
        return ours
    if len(own) != len(ours):
        return f"{len(own)} arrays, and {len(ours)}"
    for one, other in zip(own, ours, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{one.dtype}{list(one.shape)}, and {other.dtype}{list(other.shape)}"
        if not np.allclose(one, other, rtol=1e-4, atol=1e-5, equal_nan=True):
            return "other numbers"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("libraries", nargs="*", default=LIBRARIES)
    parser.add_argument("-k", default="", help="programs whose name has this in it")
    parser.add_argument("--replaced", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--into", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.into:
        warnings.simplefilter("ignore")
        found = run_all(given.libraries[0], given.replaced, given.k)
        Path(given.into).write_bytes(pickle.dumps(found))
        return 0
    failed = 0
    for library in given.libraries:
        start = time.perf_counter()
        own, ours = outcomes(library, given.k)
        differs = {name: difference(own[name], ours[name]) for name in own}
        good = [name for name, text in differs.items() if text is None]
        failed += len(differs) - len(good)
        print(f"{library}: {len(good)} of {len(differs)} equal, {time.perf_counter() - start:.0f} s", flush=True)
        for name, text in differs.items():
            if text is not None:
                print(f"  {name}: {text}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
