# SPDX-License-Identifier: Apache-2.0
"""`Checkpoints`: steps of a training in a folder, on Orbax, which writes in the background and from all processes."""

from __future__ import annotations

import operator
import os
import shutil
import tempfile
from collections.abc import Awaitable, Mapping
from types import TracebackType
from typing import Any, Self, cast

import jax

from graftax._base.errors import GraftaxError
from graftax._io import orbax_arrays
from graftax._io.encode_graph import Outline
from graftax._io.errors import LoadError
from graftax._io.load_into import Like
from graftax._io.peek import Peek, peek_source
from graftax._io.placement import Placing
from graftax._io.preemption import Preemption
from graftax._io.reader import Source, named_errors
from graftax._io.save import file_bytes
from graftax._io.tensor import Leaf, Outside
from graftax._jax.tracebacks import boundary

NO_ORBAX = "graftax.Checkpoints needs Orbax: pip install 'graftax[orbax]' ({error})"
NOT_SAVED = "the checkpoint of step {step} was not saved: {error}"
NO_STEP = "there is no step {step} in {folder}: it has {steps}"
NO_METRIC = "best={name!r} asks for a metric, and save() was given metrics={metrics!r}"

_UNFINISHED = ".orbax-checkpoint-tmp"
_FILE = "graph.safetensors"


class Checkpoints:
    """The checkpoints of a training run in a folder: one for every so many steps, of which the newest are kept.

    They are written in the background; an incomplete one is never listed in `steps`. Several processes may write, each
    its own part, and another number of processes can read it.

    Args:
        folder: the folder, which is created if it does not exist.
        every: the number of steps from one checkpoint to the next.
        keep: how many of the newest checkpoints are kept; None for all.
        best: the name of a metric: the checkpoint with its smallest value is kept, too. With `"-name"` the largest.
        on_preemption: also saves the step at which the system announces the end of the program (SIGTERM).

    Raises:
        ImportError: if Orbax is not installed.
        ValueError: by `save`, if `best` names a metric that it was not given.

    Example:
        >>> state = {"w": jnp.zeros(3), "step": 0}
        >>> with graftax.Checkpoints(folder / "run", every=2, keep=3) as checkpoints:
        ...     start = checkpoints.restore(state)
        ...     for step in range(5):
        ...         state["w"], state["step"] = state["w"] + 1, step
        ...         saved = checkpoints.save(step, state)
        >>> start, checkpoints.steps
        (None, [0, 2, 4])
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every: int = 1000,
        keep: int | None = 3,
        best: str | None = None,
        on_preemption: bool = True,
    ) -> None:
        try:
            from orbax.checkpoint import v1 as orbax
        except ImportError as error:
            raise ImportError(NO_ORBAX.format(error=error)) from error
        when: Any = orbax.training.save_decision_policies
        which: Any = orbax.training.preservation_policies
        kept: list[Any] = [which.PreserveAll() if keep is None else which.LatestN(keep)]
        self._best = best
        if best is not None:
            name = best.removeprefix("-")
            kept.append(
                which.BestN(
                    get_metric_fn=operator.itemgetter(name),
                    reverse=not best.startswith("-"),
                    n=1,
                    keep_checkpoints_without_metrics=False,
                )
            )
        self.folder = os.path.abspath(folder)
        self._orbax: Any = orbax
        self._all: Any = orbax.training.Checkpointer(
            self.folder,
            save_decision_policy=when.FixedIntervalPolicy(every),
            preservation_policy=which.AnyPreservationPolicy(kept),
            cleanup_tmp_directories=False,  # a program that only reads would end the save of another
        )
        self._cleared = False
        self._preemption = Preemption() if on_preemption else None
        self._writing: int | None = None  # the step that is written in the background

    @property
    def steps(self) -> list[int]:
        """The steps that are complete, in order."""
        return sorted(found.step for found in self._all.checkpoints)

    @property
    def latest(self) -> int | None:
        return max(self.steps, default=None)

    @property
    def preempted(self) -> bool:
        """Has the system announced that it ends this program? The last step is saved then: leave the loop."""
        return self._preemption is not None and self._preemption.saved

    @boundary
    def save(
        self, step: int, state: Any, host: Any = None, metrics: Mapping[str, float] | None = None, force: bool = False
    ) -> bool:
        """Saves a step where it is its turn. `state` may change, and be donated, as soon as this returns.

        Call it at every step: then hosts agree about the step that is saved before the system ends the program.

        Args:
            step: its number.
            state: any object: model, optimizer, numbers.
            host: what each process has for itself, such as a data loader: an object with `get_state` and `set_state`.
            metrics: numbers of the step, for `best`.
            force: save it whatever its number is: the last step of a training.

        Returns:
            whether it is saved.

        Raises:
            GraftaxError: where an earlier step could not be saved in the background; says which.
        """
        if self._writing is not None and not self._all.is_saving_in_progress():
            self.wait()
        last = self._is_last(step)
        if not last and not force and not self._all.should_save(step):
            return False
        self.wait()
        name = (self._best or "").removeprefix("-")
        if name and name not in (metrics or {}):
            if not last:
                raise ValueError(NO_METRIC.format(name=name, metrics=metrics))
            metrics = None
        self._clear()
        outline = Outline(state, None, None, orbax_arrays.is_beside)
        graph = file_bytes(outline.to_json(), outline.arrays) if jax.process_index() == 0 else None
        items: dict[str, Any] = {"graph": _Part(_FILE, graph)}
        if outline.outside:
            items["arrays"] = {place: orbax_arrays.given(array) for place, array in outline.outside.items()}
        if host is not None:
            own = Outline(host.get_state(), None, None)
            items["host"] = _Part(_host_file(), file_bytes(own.to_json(), own.arrays))
        self._writing = step
        numbers = None if metrics is None else {key: float(value) for key, value in metrics.items()}
        started = self._all.save_checkpointables_async(step, items, force=force or last, metrics=numbers)
        if started is None:
            self._writing = None
        if last and self._preemption is not None:
            self.wait()
            self._preemption.saved = True
        return started is not None

    @boundary
    def restore(
        self,
        like: Any,
        step: int | None = None,
        *,
        shard: Any = None,
        mesh: Any = None,
        only: Any = None,
        strict: bool = True,
        cast: bool = False,
        classes: Any = (),
        host: Any = None,
    ) -> int | None:
        """Gives `like` the values of a step, in place, all or none. The options are those of `graftax.load`.

        Args:
            like: objects of the same structure, which may change.
            step: the newest one if it is not given.
            host: gets what this process saved, where there is something.

        Returns:
            the step; None where there is none yet.

        Raises:
            LoadError: with every difference from `like`, or where there is no such step.
        """
        self.wait()
        step = self.latest if step is None else step
        if step is None:
            return None
        source = self._source(step)
        with named_errors(source.path):
            loading = Like(source, Placing(source, shard, mesh, False), like, only, strict, cast, classes, mesh)
            loading.fetch = lambda wanted: self._arrays(step, loading.places, wanted)
            loading.loaded({}, True)
        if host is not None:
            part = self._part(step, "host", _host_file())
            if part is not None:
                host.set_state(_of_bytes(part, os.path.join(self.folder, str(step), _host_file()), host.get_state()))
        return step

    @boundary
    def peek(self, step: int | None = None) -> Peek:
        """What is in a step, without its data."""
        self.wait()
        step = self.latest if step is None else step
        if step is None:
            raise LoadError(f"there is no step in {self.folder}")
        return peek_source(self._source(step))

    @boundary
    def wait(self) -> None:
        """Waits until nothing is written any more. Raises GraftaxError where a step could not be saved."""
        step, self._writing = self._writing, None
        try:
            self._all.wait()
        except Exception as error:
            raise GraftaxError(NOT_SAVED.format(step=step, error=error)) from error

    def close(self) -> None:
        """Waits, and ends the threads."""
        self._close(True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(error is None)

    def _close(self, end: bool) -> None:
        try:
            self.wait()
        finally:
            self._all.close()
            if self._preemption is not None:
                self._preemption.close(end)

    def _is_last(self, step: int) -> bool:
        """Is this the step that is saved before the system ends the program?"""
        if self._preemption is None:
            return False
        if self._preemption.saved and not jax.distributed.is_initialized():
            self._preemption.end()
        self._preemption.listen()
        return self._preemption.reached(step)

    def _clear(self) -> None:
        """Removes what a process left that died while it saved. One program at a time saves into a folder."""
        if not self._cleared and jax.process_index() == 0:
            for name in os.listdir(self.folder):
                if _UNFINISHED in name:
                    shutil.rmtree(os.path.join(self.folder, name), ignore_errors=True)
        self._cleared = True

    def _part(self, step: int, item: str, name: str) -> bytes | None:
        if step not in self.steps:
            raise LoadError(NO_STEP.format(step=step, folder=self.folder, steps=self.steps))
        part = _Part(name)
        try:
            self._all.load_checkpointables(step, {item: part})
        except KeyError:  # the step has no such item
            return None
        return part.data

    def _source(self, step: int) -> Source:
        data = self._part(step, "graph", _FILE)
        path = os.path.join(self.folder, str(step), "graph", _FILE)
        if data is None:
            raise LoadError(f"{path} is missing: the step was not saved by graftax.Checkpoints")
        return _opened(data, path)

    def _arrays(self, step: int, places: list[str], wanted: dict[str, tuple[Leaf, Any]]) -> dict[str, Any]:
        """The arrays at some of all places, each with its sharding; without one as NumPy arrays."""
        outside = {place: cast(Outside, leaf.outside) for place, (leaf, _) in wanted.items()}
        abstract = {
            place: orbax_arrays.asked(outside[place], wanted[place][1]) if place in wanted else self._orbax.PLACEHOLDER
            for place in places
        }
        with jax.enable_x64(True):
            held = self._all.load_checkpointables(step, {"arrays": abstract})["arrays"]
        return {place: orbax_arrays.found(outside[place], held[place]) for place in wanted}


class _Part:
    """A file of a step, as Orbax asks for the content of its items."""

    def __init__(self, name: str, data: bytes | None = None) -> None:
        self._name, self.data = name, data

    async def save(self, directory: Any) -> Awaitable[None]:
        async def write() -> None:
            folder = await directory.await_creation()
            if self.data is not None:
                (folder / self._name).write_bytes(self.data)

        return write()

    async def load(self, directory: Any) -> Awaitable[None]:
        async def read() -> None:
            path = directory / self._name
            self.data = path.read_bytes() if path.exists() else None

        return read()


def _host_file() -> str:
    return f"host-{jax.process_index()}.safetensors"


def _opened(data: bytes, path: str) -> Source:
    with tempfile.TemporaryDirectory() as folder:
        name = os.path.join(folder, _FILE)
        with open(name, "wb") as file:
            file.write(data)
        source = Source(name)
    source.path = path
    return source


def _of_bytes(data: bytes, path: str, like: Any) -> Any:
    source = _opened(data, path)
    with named_errors(path):
        return Like(source, Placing(source, None, None, False), like, None, False, False, (), None).loaded({}, False)
