# SPDX-License-Identifier: Apache-2.0
"""JAX's transforms for functions of any objects: each file says only what its transform changes."""

from .autodiff import grad as grad
from .autodiff import hessian as hessian
from .autodiff import jacfwd as jacfwd
from .autodiff import jacrev as jacrev
from .autodiff import jvp as jvp
from .autodiff import linearize as linearize
from .autodiff import value_and_grad as value_and_grad
from .autodiff import vjp as vjp
from .callbacks import io_callback as io_callback
from .callbacks import pure_callback as pure_callback
from .custom import custom_jvp as custom_jvp
from .custom import custom_vjp as custom_vjp
from .filtered import filter_checkpoint as filter_checkpoint
from .filtered import filter_closure_convert as filter_closure_convert
from .filtered import filter_eval_shape as filter_eval_shape
from .filtered import filter_grad as filter_grad
from .filtered import filter_hessian as filter_hessian
from .filtered import filter_jacfwd as filter_jacfwd
from .filtered import filter_jacrev as filter_jacrev
from .filtered import filter_jvp as filter_jvp
from .filtered import filter_make_jaxpr as filter_make_jaxpr
from .filtered import filter_pure_callback as filter_pure_callback
from .filtered import filter_shard as filter_shard
from .filtered import filter_value_and_grad as filter_value_and_grad
from .filtered import filter_vjp as filter_vjp
from .filtered_custom import filter_custom_jvp as filter_custom_jvp
from .filtered_custom import filter_custom_vjp as filter_custom_vjp
from .remat import checkpoint as checkpoint
from .remat import remat as remat
from .staging import eval_shape as eval_shape
from .staging import make_jaxpr as make_jaxpr
