# SPDX-License-Identifier: Apache-2.0
"""`Checkpoints`: the steps of a training run in a folder, written by Orbax in the background and from all processes."""

from __future__ import annotations

import operator
import os
import shutil
import tempfile
from collections.abc import Awaitable, Mapping
from types import TracebackType
from typing import Any, Self, cast

import jax
from jax.sharding import Mesh

from graftax._base.errors import GraftaxError
from graftax._io import orbax_arrays
from graftax._io.encode_graph import EncodedGraph
from graftax._io.errors import LoadError
from graftax._io.load_like import LoadInto
from graftax._io.peek import Peek, peek_source
from graftax._io.placement import Placement
from graftax._io.preemption import Preemption
from graftax._io.reader import Source, named_errors
from graftax._io.save import file_bytes
from graftax._io.tensor import ExternalArray, Leaf
from graftax._jax.tracebacks import boundary

_UNFINISHED = ".orbax-checkpoint-tmp"
_FILE = "graph.safetensors"


class Checkpoints:
    """Saves checkpoints of a training run to a folder at regular steps, and keeps the newest.

    Checkpoints are written in the background; `steps` lists only complete ones. All processes make the same calls, and
    each writes its own part; any other number of processes can read the checkpoint.

    Args:
        folder: the folder of the checkpoints, which is created if it does not exist.
        every: a step is saved if it is a multiple of this.
        keep: how many of the newest steps are kept; None keeps all.
        best: the name of a metric: the step with its smallest value is kept too; `"-name"` for the largest.
        on_preemption: the step at which the system announces the end of the program (SIGTERM) is saved as well.

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
            raise ImportError(f"graftax.Checkpoints needs Orbax: pip install 'graftax[orbax]' ({error})") from error
        # Orbax has no annotations for these modules.
        save_policies: Any = orbax.training.save_decision_policies
        preservation_policies: Any = orbax.training.preservation_policies
        preserved: list[Any] = [
            preservation_policies.PreserveAll() if keep is None else preservation_policies.LatestN(keep)
        ]
        self._best = best
        if best is not None:
            name = best.removeprefix("-")
            preserved.append(
                preservation_policies.BestN(
                    get_metric_fn=operator.itemgetter(name),
                    reverse=not best.startswith("-"),
                    n=1,
                    keep_checkpoints_without_metrics=False,
                )
            )
        self.folder = os.path.abspath(folder)
        self._orbax: Any = orbax
        self._checkpointer: Any = orbax.training.Checkpointer(
            self.folder,
            save_decision_policy=save_policies.FixedIntervalPolicy(every),
            preservation_policy=preservation_policies.AnyPreservationPolicy(preserved),
            cleanup_tmp_directories=False,  # a program that only reads must not end another's save: `_clear` does it
        )
        self._cleared = False  # by the first `save`, since only a program that saves may remove unfinished steps
        self._preemption = Preemption() if on_preemption else None
        self._writing: int | None = None  # the step that is being written in the background

    @property
    def steps(self) -> list[int]:
        """The complete steps, in order."""
        return sorted(checkpoint.step for checkpoint in self._checkpointer.checkpoints)

    @property
    def latest(self) -> int | None:
        """The newest complete step; None if there is none."""
        return max(self.steps, default=None)

    @property
    def preempted(self) -> bool:
        """Has the system announced the end of the program? Then the last step is saved: leave the loop."""
        return self._preemption is not None and self._preemption.saved

    @boundary
    def save(
        self,
        step: int,
        state: object,
        host: Any = None,
        metrics: Mapping[str, float] | None = None,
        force: bool = False,
    ) -> bool:
        """Saves a step if it is due. `state` may be changed or donated as soon as this returns.

        Call it at every step, so that hosts agree on the step to save before the system ends the program.

        Args:
            step: the number of the step.
            state: any object: model, optimizer, numbers.
            host: the state that each process has for itself, such as that of a data loader: an object with `get_state`
                and `set_state`.
            metrics: metrics of the step, for `best`.
            force: save the step whatever its number is, as for the last step of a training run.

        Returns:
            whether the step is saved.

        Raises:
            GraftaxError: if an earlier step could not be saved in the background; names the step.
        """
        # A save that ended in the meantime may have failed: `wait` raises its error.
        if self._writing is not None and not self._checkpointer.is_saving_in_progress():
            self.wait()
        is_preemption_step = self._is_preemption_step(step)
        if not is_preemption_step and not force and not self._checkpointer.should_save(step):
            return False
        # An error of the previous step is raised here, with the number of that step.
        self.wait()
        name = (self._best or "").removeprefix("-")
        if name and name not in (metrics or {}):  # a preempted program may not have computed it
            if not is_preemption_step:
                raise ValueError(f"best={name!r} asks for a metric, and save() was given metrics={metrics!r}")
            metrics = None
        self._clear()
        # All that is saved is collected here: from now on, `state` may change while Orbax writes in the background.
        items = _items(state, host)
        self._writing = step
        numbers = None if metrics is None else {key: float(value) for key, value in metrics.items()}
        started = self._checkpointer.save_checkpointables_async(
            step, items, force=force or is_preemption_step, metrics=numbers
        )
        if started is None:  # Orbax has declined to save the step
            self._writing = None
        # The program may end at any moment: do not return before the step is complete.
        if is_preemption_step and self._preemption is not None:
            self.wait()
            self._preemption.saved = True
        return started is not None

    @boundary
    def restore(
        self,
        like: object,
        step: int | None = None,
        *,
        shard: object = None,
        mesh: Mesh | None = None,
        only: object = None,
        strict: bool = True,
        cast: bool = False,
        classes: object = (),
        host: Any = None,
    ) -> int | None:
        """Writes the values of a step into `like`, all of them or none. The options are those of `graftax.load`.

        Args:
            like: objects of the same structure.
            step: the step; by default the newest one.
            host: the object whose `set_state` gets the state that this process saved, if there is one.

        Returns:
            the step; None if there is none yet.

        Raises:
            LoadError: with every difference from `like`, or if there is no such step.
        """
        self.wait()
        step = self.latest if step is None else step
        if step is None:
            return None
        source = self._source(step)
        with named_errors(source.path):
            loading = LoadInto(source, Placement(source, shard, mesh), like, only, strict, cast, classes)
            # Orbax reads only the arrays that `like` needs, once they are known to fit.
            loading.fetch = lambda requests: self._arrays(step, loading.external_keys, requests)
            loading.load({}, into=True)
        if host is not None:
            part = self._part(step, "host", _host_file())
            if part is not None:
                host.set_state(_load_bytes(part, os.path.join(self.folder, str(step), _host_file()), host.get_state()))
        return step

    @boundary
    def peek(self, step: int | None = None) -> Peek:
        """The contents of a step, without its data."""
        self.wait()
        step = self.latest if step is None else step
        if step is None:
            raise LoadError(f"there is no step in {self.folder}")
        return peek_source(self._source(step))

    @boundary
    def wait(self) -> None:
        """Waits until the step that is being written is complete.

        Raises:
            GraftaxError: if it could not be saved.
        """
        step_number, self._writing = self._writing, None
        try:
            self._checkpointer.wait()
        except Exception as error:
            raise GraftaxError(f"the checkpoint of step {step_number} was not saved: {error}") from error

    def close(self) -> None:
        """Waits for the step that is being written, and ends the background threads."""
        self._close(True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exception_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(error is None)

    def _close(self, end: bool) -> None:
        # The threads end even if the last step could not be saved.
        try:
            self.wait()
        finally:
            self._checkpointer.close()
            if self._preemption is not None:
                self._preemption.close(end)

    def _is_preemption_step(self, step_number: int) -> bool:
        """Is this the step to save before the system ends the program?"""
        if self._preemption is None:
            return False
        # The program went on after the last save: the signal does what it would have done.
        if self._preemption.saved and not jax.distributed.is_initialized():
            self._preemption.end()
        self._preemption.listen()
        return self._preemption.reached(step_number)

    def _clear(self) -> None:
        """Removes unfinished steps of a process that died. Only one program at a time saves to a folder."""
        if not self._cleared and jax.process_index() == 0:
            for name in os.listdir(self.folder):
                if _UNFINISHED in name:
                    shutil.rmtree(os.path.join(self.folder, name), ignore_errors=True)
        self._cleared = True

    def _part(self, step_number: int, item: str, name: str) -> bytes | None:
        if step_number not in self.steps:
            raise LoadError(f"there is no step {step_number} in {self.folder}: it has {self.steps}")
        part = _Part(name)  # Orbax calls its `load`, which fills it
        try:
            self._checkpointer.load_checkpointables(step_number, {item: part})
        except KeyError:  # the step has no such item
            return None
        return part.data

    def _source(self, step_number: int) -> Source:
        data = self._part(step_number, "graph", _FILE)
        path = os.path.join(self.folder, str(step_number), "graph", _FILE)
        if data is None:
            raise LoadError(f"{path} is missing: the step was not saved by graftax.Checkpoints")
        return _open_bytes(data, path)

    def _arrays(self, step_number: int, keys: list[str], requests: dict[str, tuple[Leaf, Any]]) -> dict[str, Any]:
        """Reads the requested arrays, each with its sharding, or as a NumPy array if it has none.

        Args:
            step_number: the step.
            keys: the keys of all arrays of the step: Orbax wants an entry for each.
            requests: the requested arrays, by key.
        """
        externals = {key: cast(ExternalArray, leaf.outside) for key, (leaf, _) in requests.items()}
        abstract = {
            key: orbax_arrays.restore_args(externals[key], requests[key][1])
            if key in requests
            else self._orbax.PLACEHOLDER
            for key in keys
        }
        # Arrays of 64 bits keep their dtype, whatever the setting is.
        with jax.enable_x64(True):
            restored = self._checkpointer.load_checkpointables(step_number, {"arrays": abstract})["arrays"]
        return {key: orbax_arrays.restored_array(externals[key], restored[key]) for key in requests}


class _Part:
    """A file of a step, with the methods by which Orbax saves and loads an item."""

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


def _items(state: object, host: Any) -> dict[str, Any]:
    """What Orbax saves of a step, by name: the graph of the state, its arrays, and the state of this process."""
    encoded = EncodedGraph(state, is_external=orbax_arrays.is_external)
    # The graph is the same in all processes, so process 0 alone writes it; the others have an item without data.
    graph = file_bytes(encoded) if jax.process_index() == 0 else None
    items: dict[str, Any] = {"graph": _Part(_FILE, graph)}
    if encoded.external_arrays:
        items["arrays"] = {key: orbax_arrays.orbax_input(array) for key, array in encoded.external_arrays.items()}
    if host is not None:
        items["host"] = _Part(_host_file(), file_bytes(EncodedGraph(host.get_state())))
    return items


def _host_file() -> str:
    return f"host-{jax.process_index()}.safetensors"


def _open_bytes(data: bytes, path: str) -> Source:
    # Orbax may keep the file in storage that cannot be mapped, so it is copied to a local one.
    with tempfile.TemporaryDirectory() as folder:
        name = os.path.join(folder, _FILE)
        with open(name, "wb") as file:
            file.write(data)
        source = Source(name)
    source.path = path  # for errors; the copy is gone, but stays mapped
    return source


def _load_bytes(data: bytes, path: str, like: object) -> Any:
    source = _open_bytes(data, path)
    with named_errors(path):
        return LoadInto(source, Placement(source), like, strict=False).load({}, into=False)
