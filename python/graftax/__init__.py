# SPDX-License-Identifier: Apache-2.0
"""graftax: `jax.jit` for any Python objects. Arrays are traced, the rest is static, references and changes are kept."""

from ._setup import setup as _setup

_setup()

from ._aot import Compiled as Compiled
from ._aot import Lowered as Lowered
from ._aot import Traced as Traced
from ._call import Jitted as Jitted
from ._core import GraphDef as GraphDef
from ._errors import CapturedArrayWarning as CapturedArrayWarning
from ._errors import CheckError as CheckError
from ._errors import ConcurrentChangeError as ConcurrentChangeError
from ._errors import GraftaxError as GraftaxError
from ._errors import LostChangeWarning as LostChangeWarning
from ._errors import MutationError as MutationError
from ._errors import RecompileWarning as RecompileWarning
from ._errors import StructureError as StructureError
from ._errors import UnpicklableError as UnpicklableError
from ._errors import UnsupportedValueError as UnsupportedValueError
from ._jit import filter_jit as filter_jit
from ._jit import jit as jit
from ._table import CacheInfo as CacheInfo
from .export import Exported as Exported
from .export import export as export
from .flatform import from_dict as from_dict
from .flatform import to_dict as to_dict
from .graph import flatten as flatten
from .graph import unflatten as unflatten
from .marks import Dynamic as Dynamic
from .marks import Static as Static
from .packed import Packed as Packed
from .packed import pack as pack
from .path import Path as Path
from .path import Ref as Ref
from .registry import register_static as register_static
from .transforms import associative_scan as associative_scan
from .transforms import checkpoint as checkpoint
from .transforms import cond as cond
from .transforms import custom_jvp as custom_jvp
from .transforms import custom_vjp as custom_vjp
from .transforms import eval_shape as eval_shape
from .transforms import filter_checkpoint as filter_checkpoint
from .transforms import filter_closure_convert as filter_closure_convert
from .transforms import filter_custom_jvp as filter_custom_jvp
from .transforms import filter_custom_vjp as filter_custom_vjp
from .transforms import filter_eval_shape as filter_eval_shape
from .transforms import filter_grad as filter_grad
from .transforms import filter_hessian as filter_hessian
from .transforms import filter_jacfwd as filter_jacfwd
from .transforms import filter_jacrev as filter_jacrev
from .transforms import filter_jvp as filter_jvp
from .transforms import filter_make_jaxpr as filter_make_jaxpr
from .transforms import filter_pure_callback as filter_pure_callback
from .transforms import filter_shard as filter_shard
from .transforms import filter_value_and_grad as filter_value_and_grad
from .transforms import filter_vjp as filter_vjp
from .transforms import filter_vmap as filter_vmap
from .transforms import fori_loop as fori_loop
from .transforms import grad as grad
from .transforms import hessian as hessian
from .transforms import io_callback as io_callback
from .transforms import jacfwd as jacfwd
from .transforms import jacrev as jacrev
from .transforms import jvp as jvp
from .transforms import linearize as linearize
from .transforms import make_jaxpr as make_jaxpr
from .transforms import map as map
from .transforms import pure_callback as pure_callback
from .transforms import remat as remat
from .transforms import scan as scan
from .transforms import shard_map as shard_map
from .transforms import switch as switch
from .transforms import value_and_grad as value_and_grad
from .transforms import vjp as vjp
from .transforms import vmap as vmap
from .transforms import while_loop as while_loop

__version__ = "0.1.0"
