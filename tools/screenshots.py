# SPDX-License-Identifier: Apache-2.0
"""Pictures of the pages that graftax makes, by headless Chromium: python tools/screenshots.py FOLDER [SITE].

Each in light and dark, wide and narrow, and all four beside each other, to be looked at. docs/pictures keeps some,
made small with pngquant. SITE is the folder that `make docs` built.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import graftax
from graftax._cli.demo.plain_model import Network

WIDTHS = {"wide": 1100, "narrow": 420}
HEIGHT = 620
THEMES = {"light": 1, "dark": 0}  # the setting of Chromium


class Node:
    def __init__(self, name: str) -> None:
        self.name, self.w, self.next, self.last = name, jnp.ones((4, 4)), None, None


def cycle() -> Any:
    nodes = [Node(name) for name in ("one", "two", "three")]
    for node, after in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
        node.next, node.last = after, nodes[-1]
    return nodes[0]


class Attention:
    def __init__(self, width: int) -> None:
        self.query, self.key, self.value, self.out = (jnp.zeros((width, width)) for _ in range(4))


class Block:
    def __init__(self, model: Any, width: int) -> None:
        self.model, self.attention, self.heads, self.activation = model, Attention(width), 4, jnp.tanh
        self.up, self.down, self.norm = jnp.zeros((width, 4 * width)), jnp.zeros((4 * width, width)), jnp.ones(width)


class Transformer:
    """Of 10,000 arrays, nearly; the table is used for the embedding and for the output."""

    def __init__(self, layers: int = 1428, width: int = 8) -> None:
        self.embed = self.unembed = jnp.zeros((256, width))
        self.blocks = [Block(self, width) for _ in range(layers)]


STEPS = """
import graftax, jax.numpy as jnp
step = graftax.jit(lambda config, x: jnp.tanh(x) if config["activation"] == "tanh" else x)
for size in (3, 4, 5):
    step({"activation": "tanh"}, jnp.ones(size))
step({"activation": "relu"}, jnp.ones(3))
"""


def trace(folder: Path) -> Path:
    """The page of `python -m graftax explain`, of a function that recompiles."""
    written = folder / "trace.jsonl"
    environment = {**os.environ, "GRAFTAX_EXPLAIN": str(written)}
    (folder / "train.py").write_text(STEPS, encoding="utf-8")
    subprocess.run([sys.executable, "train.py"], check=True, env=environment, cwd=folder)
    subprocess.run([sys.executable, "-m", "graftax", "explain", str(written)], check=True, capture_output=True)
    return folder / "trace.html"


NOTEBOOKS = {"notebook-light": "#ffffff", "notebook-dark": "#111111"}
NOTEBOOK = """<!doctype html><meta charset="utf-8">
<style>body {{ background: {back}; color: gray; font: 14px sans-serif; padding: 12px }}</style>
<p>[1]: graftax.show(model)</p><div>{shown}</div><p>[2]:</p>"""


def notebook(folder: Path, name: str, back: str) -> Path:
    """A page that shows a model as a notebook does. Its own theme counts, not the system's."""
    page = folder / f"{name}.html"
    shown = graftax.show(Network(jax.random.key(0)))._repr_html_()
    page.write_text(NOTEBOOK.format(back=back, shown=shown), encoding="utf-8")
    return page


def pages(folder: Path, site: Path | None) -> dict[str, Path]:
    shown = {"show-demo": Network(jax.random.key(0)), "show-cycle": cycle(), "show-transformer": Transformer()}
    made = {name: folder / f"{name}.html" for name in shown}
    for name, path in made.items():
        graftax.show(shown[name]).html(path)
    made["explain"] = trace(folder)
    made |= {name: notebook(folder, name, back) for name, back in NOTEBOOKS.items()}
    if site is not None:
        made |= {"site": site / "index.html", "site-tutorial": site / "tutorial.html"}
        made["site-reference"] = site / "api" / "jit.html"
    return made


def shoot(page: Path, out: Path, width: int, theme: int, height: int = HEIGHT) -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome") or "chrome"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=4000"]
    options += [f"--blink-settings=preferredColorScheme={theme}", f"--window-size={width},{height}"]
    subprocess.run([chromium, *options, f"--screenshot={out}", page.as_uri()], check=True, capture_output=True)


def together(folder: Path, name: str) -> None:
    """The four pictures of one page as one."""
    rows = [f'<img src="{name}-wide-{theme}.png"> <img src="{name}-narrow-{theme}.png">' for theme in THEMES]
    page = folder / f"{name}.html"
    style = f"body {{ margin: 8px; background: #8b93a1 }} img {{ height: {HEIGHT // 2}px }}"
    page.write_text(f"<style>{style}</style>{'<br>'.join(rows)}", encoding="utf-8")
    shoot(page, folder / f"{name}.png", sum(WIDTHS.values()) // 2 + 24, 1, HEIGHT + 28)
    page.unlink()


def main(out: str, site: str | None = None) -> None:
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        for name, page in pages(Path(made), Path(site).resolve() if site else None).items():
            for size, width in WIDTHS.items():
                for theme, setting in THEMES.items():
                    shoot(page, folder / f"{name}-{size}-{theme}.png", width, setting)
            together(folder, name)


if __name__ == "__main__":
    main(*sys.argv[1:])
