# SPDX-License-Identifier: Apache-2.0
# pyright: basic
"""`python -m graftax demo`: three models, one `jit`, and what each way of compiling a step costs."""

from collections.abc import Sequence

_NEEDS = frozenset({"equinox", "flarejax", "flax", "optax", "rich", "sklearn"})


def main(*, trace: bool = False, quick: bool = False, models: Sequence[str] = ()) -> int:
    """Run the demo, or with `trace` the experiment that counts flatten and unflatten calls.

    Returns the exit status: 1 where graftax fails or a library of the demo is missing.
    """
    try:
        if trace:
            from graftax._cli.demo.experiment import show

            return show()
        from graftax._cli.demo.report import show_all

        return show_all(quick=quick, models=models)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _NEEDS:
            raise
        print(f"The demo needs {missing}, which is not installed: pip install 'graftax[demo]'")
        return 1
