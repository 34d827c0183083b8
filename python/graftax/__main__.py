# SPDX-License-Identifier: Apache-2.0
"""The command line: `python -m graftax demo | bench | doctor`."""

import argparse
import importlib
import importlib.metadata
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from graftax import __version__

MODELS = ("equinox", "nnx", "plain")
OPTIONAL = ("equinox", "flax", "optax", "flarejax", "scikit-learn", "rich", "hypothesis")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m graftax", description="Demo, benchmarks and diagnosis.")
    commands = parser.add_subparsers(dest="command", required=True)

    demo = commands.add_parser("demo", help="train three models through graftax.jit and compare it with others")
    demo.add_argument("--quick", action="store_true", help="few epochs, few timed steps")
    demo.add_argument("--trace", action="store_true", help="show the flatten and unflatten calls of one call instead")
    demo.add_argument("--model", action="append", choices=MODELS, default=[], help="only this one; may be repeated")

    commands.add_parser(
        "bench",
        help="run benchmarks/run.py of a checkout: --budgets, --growth, --plot FILE and other options of its own",
        add_help=False,
    )
    commands.add_parser("doctor", help="print versions, devices and what graftax found")

    options, rest = parser.parse_known_args(argv)
    if options.command == "bench":
        return bench(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if options.command == "doctor":
        return doctor()
    from . import _demo

    return _demo.main(trace=options.trace, quick=options.quick, models=options.model)


def bench(argv: list[str]) -> int:
    """Run `benchmarks/run.py`, which is part of a checkout and not of the installed package."""
    here = Path(__file__).resolve()
    for root in (Path.cwd(), *Path.cwd().parents, *here.parents):
        if (root / "benchmarks" / "run.py").is_file() and (root / "python" / "graftax").is_dir():
            break
    else:
        print(
            "The benchmarks are not part of the installed package: run this in a checkout of graftax,"
            " where benchmarks/run.py lies.",
            file=sys.stderr,
        )
        return 2
    sys.path.insert(0, str(root))
    run: Callable[[list[str]], int] = importlib.import_module("benchmarks.run").main
    return run(argv)


def doctor() -> int:
    """Print what a bug report needs; the exit status is 1 where the extension does not load."""
    rows: list[tuple[str, str]] = [
        (
            "python",
            f"{platform.python_version()} ({platform.python_implementation()}, {platform.platform()})",
        ),
        ("graftax", __version__),
        ("jax", _version("jax")),
        ("jaxlib", _version("jaxlib")),
        ("numpy", _version("numpy")),
        ("devices", _devices()),
    ]
    extension, loaded = _extension()
    rows.append(("extension", extension))
    rows.append(("direct dispatch", _direct_dispatch()))
    rows += [(name, _version(name)) for name in OPTIONAL]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:{width}}  {value}")
    return 0 if loaded else 1


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> str:
    import jax

    try:
        devices = cast("list[Any]", jax.devices())  # pyright: ignore[reportUnknownMemberType]
        return ", ".join(f"{device.device_kind} ({device.platform}:{device.id})" for device in devices)
    except RuntimeError as error:
        return f"none: {error}"


def _extension() -> tuple[str, bool]:
    try:
        return str(importlib.import_module("graftax._core").__file__), True
    except ImportError as error:
        return f"does not load: {error}", False


def _direct_dispatch() -> str:
    try:
        return importlib.import_module("graftax._direct").status()
    except ImportError:
        return "off: the extension does not load"


if __name__ == "__main__":
    sys.exit(main())
