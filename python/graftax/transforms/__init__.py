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
from .mapping import shard_map as shard_map
from .mapping import vmap as vmap
