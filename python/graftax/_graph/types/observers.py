# SPDX-License-Identifier: Apache-2.0
"""Objects of other libraries that report on a program and are no part of it: they count by identity, unopened."""

from __future__ import annotations

# By the module and the name of a class, or of one that it derives from: none of them has to be imported.
_OUTSIDE = frozenset({
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


def stands_outside(cls: type) -> bool:
    return any((base.__module__, base.__qualname__) in _OUTSIDE for base in cls.__mro__[:-1])
