# SPDX-License-Identifier: Apache-2.0
# pyright: basic
"""The demo as it appears on the terminal: a progress bar per model, then a table per model."""

from collections.abc import Sequence
from types import ModuleType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from graftax._cli.demo import digits, equinox_model, nnx_model, plain_model
from graftax._cli.demo.compare import compare, table
from graftax._cli.demo.training import BATCH, Jit, run

MODELS: dict[str, ModuleType] = {"equinox": equinox_model, "nnx": nnx_model, "plain": plain_model}
EPOCHS, QUICK_EPOCHS = 12, 4


def show_all(
    *, quick: bool = False, models: Sequence[str] = (), jit: Jit | None = None, console: Console | None = None
) -> int:
    """Train every model of `models` (all by default) and compare; the exit status is 1 where graftax fails.

    `quick` trains for a few epochs and times a few steps.
    """
    console = console or Console()
    data = digits.load()
    chosen = [MODELS[name] for name in models or MODELS]
    for model in chosen:
        _train(model, data, QUICK_EPOCHS if quick else EPOCHS, jit, console)

    batches = data.batches(BATCH, seed=0)
    if quick:
        batches = batches[:5]
    console.print(
        f"\nOne training step of {BATCH} images: the median of interleaved rounds of {len(batches)} steps,"
        " and the calls of flatten and unflatten functions in one step."
    )
    failed = False
    for model in chosen:
        # graftax comes last among the contenders, and only its failure is one of the demo.
        with console.status("comparing"):
            results = compare(model.contenders(jit), batches, rounds=11 if quick else 15)
        console.print(table(model.TITLE, results))
        failed |= bool(results[-1].failure)
    return int(failed)


def _train(model: ModuleType, data: digits.Digits, epochs: int, jit: Jit | None, console: Console) -> None:
    console.print(f"\n[bold]{model.TITLE}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=epochs)
        for epoch in run(model.Trainer(jit), epochs, data):
            progress.console.print(
                f"epoch {epoch.number:2}   loss {epoch.loss:.4f}   accuracy {epoch.accuracy:6.1%}"
                f"   on unseen images {epoch.test_accuracy:6.1%}",
                highlight=False,
            )
            progress.advance(task)
