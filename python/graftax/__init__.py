# SPDX-License-Identifier: Apache-2.0
"""`jax.jit` for ordinary Python objects: arrays are traced, the rest is static, sharing and changes are kept.

    @graftax.jit
    def step(model, x):  # any objects; changes are applied to the caller's objects
        model.total = model.total + x

The public names, by what they are for:

- Compile:
  jit, eval_shape, make_jaxpr, Static, Dynamic, cache
- Transform:
  grad, value_and_grad, jacfwd, jacrev, hessian, jvp, vjp, linearize, vmap, shard_map, scan, Carry, map,
  associative_scan, while_loop, fori_loop, cond, switch, checkpoint, remat, custom_jvp, custom_vjp,
  pure_callback, io_callback, each, stack, unstack
- Transform by value, as Equinox does:
  filter_jit, filter_checkpoint, filter_closure_convert, filter_custom_jvp, filter_custom_vjp,
  filter_eval_shape, filter_grad, filter_hessian, filter_jacfwd, filter_jacrev, filter_jvp, filter_make_jaxpr,
  filter_pure_callback, filter_shard, filter_value_and_grad, filter_vjp, filter_vmap
- Train:
  optimizer, labels, Streams, ema
- Edit graphs:
  at, partition, combine, update, copy, equal, cast, map_leaves, flatten, unflatten, to_dict, from_dict, tree
- Inspect:
  show, explain, log_recompiles, assert_max_traces, find, shared, count, diff, nonfinite, record, minimize, memory
- Save:
  save, load, peek, Checkpoints, export
- Scale:
  Rules, fsdp, shard, pack, check_hosts
- Define classes:
  Module, field, register, register_static

`graftax.errors` has the errors and warnings, `graftax.types` the classes of results; their names are attributes of
`graftax`, too. `graftax.tree` has the functions of `jax.tree`. `graftax.replace` runs an existing program with
`graftax.jit` in place of `jax.jit`, `equinox.filter_jit` and `nnx.jit`.
"""

from graftax._base.main_interpreter import require_main as _require_main  # noqa: F401 # pyright: ignore[reportUnusedImport]
from graftax._setup import list_names as __dir__  # noqa: F401 (dir() calls it)
from graftax._setup import publish_classes as _publish_classes
from graftax._setup import setup as _setup

_setup()

from graftax import errors, tree, types
from graftax._base.trace_markers import Dynamic, Static
from graftax._explain import log_recompiles
from graftax._export.disk_cache import cache
from graftax._export.export import export
from graftax._graph.edit import combine, copy, partition, update
from graftax._graph.flat_dict import from_dict, to_dict
from graftax._graph.flatten import flatten, unflatten
from graftax._graph.module import Module
from graftax._graph.object_diff import diff, equal
from graftax._graph.pack import pack
from graftax._graph.select import at, find, shared
from graftax._graph.stack import each, stack, unstack
from graftax._graph.types.register import field, register, register_static
from graftax._io import Checkpoints, load, peek, save
from graftax._jit.api import filter_jit, jit
from graftax._jit.explain import assert_max_traces, explain
from graftax._jit.multihost_check import check_hosts
from graftax._memory.memory import memory
from graftax._record.minimize import minimize
from graftax._record.nonfinite import nonfinite
from graftax._record.recorder import record
from graftax._sharding.rules import Rules, fsdp
from graftax._show import show
from graftax._training.array_maps import cast, count, ema, map_leaves
from graftax._training.labels import labels
from graftax._training.optimizer import optimizer
from graftax._training.streams import Streams
from graftax.errors import CapturedArrayWarning as CapturedArrayWarning
from graftax.errors import CheckError as CheckError
from graftax.errors import ConcurrentChangeError as ConcurrentChangeError
from graftax.errors import GraftaxError as GraftaxError
from graftax.errors import IgnoredValueError as IgnoredValueError
from graftax.errors import ImpureCallWarning as ImpureCallWarning
from graftax.errors import LeakedTracerError as LeakedTracerError
from graftax.errors import LoadError as LoadError
from graftax.errors import LostChangeWarning as LostChangeWarning
from graftax.errors import MissedDonationWarning as MissedDonationWarning
from graftax.errors import MutationError as MutationError
from graftax.errors import RecompileError as RecompileError
from graftax.errors import RecompileWarning as RecompileWarning
from graftax.errors import RecordedCallWarning as RecordedCallWarning
from graftax.errors import SharedGradientWarning as SharedGradientWarning
from graftax.errors import StructureError as StructureError
from graftax.errors import UnknownInterpreterWarning as UnknownInterpreterWarning
from graftax.errors import UnpicklableError as UnpicklableError
from graftax.errors import UnsupportedValueError as UnsupportedValueError
from graftax.errors import UntiedWarning as UntiedWarning
from graftax.transforms._engine.scan_axes import Carry
from graftax.transforms.associative_scan import associative_scan
from graftax.transforms.callbacks import filter_pure_callback, io_callback, pure_callback
from graftax.transforms.checkpoint import checkpoint, filter_checkpoint, remat
from graftax.transforms.closure_convert import filter_closure_convert
from graftax.transforms.cond import cond, switch
from graftax.transforms.custom_jvp import custom_jvp, filter_custom_jvp
from graftax.transforms.custom_vjp import custom_vjp, filter_custom_vjp
from graftax.transforms.grad import filter_grad, filter_value_and_grad, grad, value_and_grad
from graftax.transforms.jacobian import filter_hessian, filter_jacfwd, filter_jacrev, hessian, jacfwd, jacrev
from graftax.transforms.jvp import filter_jvp, jvp, linearize
from graftax.transforms.map import map
from graftax.transforms.scan import scan
from graftax.transforms.shard import filter_shard, shard
from graftax.transforms.shard_map import shard_map
from graftax.transforms.staging import eval_shape, filter_eval_shape, filter_make_jaxpr, make_jaxpr
from graftax.transforms.vjp import filter_vjp, vjp
from graftax.transforms.vmap import filter_vmap, vmap
from graftax.transforms.while_loop import fori_loop, while_loop
from graftax.types import ArrayMemory as ArrayMemory
from graftax.types import CacheInfo as CacheInfo
from graftax.types import CallExplanation as CallExplanation
from graftax.types import Compiled as Compiled
from graftax.types import DiskCache as DiskCache
from graftax.types import Explanation as Explanation
from graftax.types import Exported as Exported
from graftax.types import GraphDef as GraphDef
from graftax.types import Jitted as Jitted
from graftax.types import Lowered as Lowered
from graftax.types import MemoryReport as MemoryReport
from graftax.types import Minimized as Minimized
from graftax.types import NonfiniteReport as NonfiniteReport
from graftax.types import Optimizer as Optimizer
from graftax.types import Packed as Packed
from graftax.types import Path as Path
from graftax.types import RecompileLog as RecompileLog
from graftax.types import Recorder as Recorder
from graftax.types import Ref as Ref
from graftax.types import Traced as Traced

__all__ = ["jit", "eval_shape", "make_jaxpr", "Static", "Dynamic", "cache"]
__all__ += ["grad", "value_and_grad", "jacfwd", "jacrev", "hessian", "jvp", "vjp", "linearize", "vmap", "shard_map"]
__all__ += ["scan", "Carry", "map", "associative_scan", "while_loop", "fori_loop", "cond", "switch", "checkpoint"]
__all__ += ["remat", "custom_jvp", "custom_vjp", "pure_callback", "io_callback", "each", "stack", "unstack"]
__all__ += ["filter_jit", "filter_checkpoint", "filter_closure_convert", "filter_custom_jvp", "filter_custom_vjp"]
__all__ += ["filter_eval_shape", "filter_grad", "filter_hessian", "filter_jacfwd", "filter_jacrev", "filter_jvp"]
__all__ += ["filter_make_jaxpr", "filter_pure_callback", "filter_shard", "filter_value_and_grad", "filter_vjp"]
__all__ += ["filter_vmap"]
__all__ += ["optimizer", "labels", "Streams", "ema"]
__all__ += ["at", "partition", "combine", "update", "copy", "equal", "cast", "map_leaves", "flatten", "unflatten"]
__all__ += ["to_dict", "from_dict", "tree"]
__all__ += ["show", "explain", "log_recompiles", "assert_max_traces", "find", "shared", "count", "diff"]
__all__ += ["nonfinite", "record", "minimize", "memory"]
__all__ += ["save", "load", "peek", "Checkpoints", "export"]
__all__ += ["Rules", "fsdp", "shard", "pack", "check_hosts"]
__all__ += ["Module", "field", "register", "register_static"]
__all__ += ["errors", "types"]

_publish_classes()

__version__ = "0.1.0"
