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
from .remat import checkpoint as checkpoint
from .remat import remat as remat
from .staging import eval_shape as eval_shape
from .staging import make_jaxpr as make_jaxpr
