# SPDX-License-Identifier: Apache-2.0
"""Observers of a program, such as tqdm or a TestCase: compared by identity, never traversed."""

from __future__ import annotations

# (module, name) of classes, whose subclasses count too. Names, so that nothing has to be imported.
_OBSERVERS = frozenset({
    ("unittest.case", "TestCase"),
    ("_pytest.fixtures", "FixtureRequest"),
    ("_pytest.capture", "CaptureFixture"),
    ("_pytest.logging", "LogCaptureFixture"),
    ("_pytest.monkeypatch", "MonkeyPatch"),
    ("tqdm.std", "tqdm"),
    ("rich.console", "Console"),
    ("rich.progress", "Progress"),
    ("tensorboardX.writer", "SummaryWriter"),
    ("torch.utils.tensorboard.writer", "SummaryWriter"),
    ("flax.metrics.tensorboard", "SummaryWriter"),
    ("clu.metric_writers.interface", "MetricWriter"),
    ("wandb.sdk.wandb_run", "Run"),
})  # fmt: skip


def is_observer(cls: type) -> bool:
    return any((base.__module__, base.__qualname__) in _OBSERVERS for base in cls.__mro__[:-1])
