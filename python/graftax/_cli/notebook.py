# SPDX-License-Identifier: Apache-2.0
"""`%load_ext graftax` in IPython: graftax's `jit` in place of others in the cells that follow, and `%graftax`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graftax._cli.watch import page, record
from graftax._cli.watch.watched import Watch
from graftax.replace import install, restore_names, summary

_watches: list[Watch] = []  # the one that runs, or none


def load(shell: Any) -> None:
    """Called by IPython through `graftax.load_ipython_extension`."""
    install()
    shell.register_magic_function(line_magic, magic_name="graftax")


def unload(shell: Any) -> None:
    """Called by IPython for `%unload_ext`: functions that were replaced stay what they are."""
    _stop()


def line_magic(line: str) -> None:
    """`%graftax`: what was replaced, or seen. `%graftax watch`, `replace`, `off`; `%graftax report page.html`."""
    command, _, path = line.strip().partition(" ")
    # Names are replaced or watched, and never both: what stands there is restored first.
    if command in ("watch", "replace", "off"):
        _stop()
        if command == "replace":
            install()
        elif command == "watch":
            _watches.append(Watch())
            _watches[0].start()
    elif command == "report" and path and _watches:
        Path(path).write_text(page.page(_watches[0].records, "this notebook"), encoding="utf-8")
    elif command:
        print("%graftax, %graftax watch, replace or off; after watch %graftax report page.html")
    else:
        print(record.summary(_watches[0].records) if _watches else summary())


def _stop() -> None:
    for watch in _watches:
        watch.stop()
    _watches.clear()
    restore_names()
