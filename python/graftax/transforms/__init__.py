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
from .branches import cond as cond
from .branches import switch as switch
from .control import associative_scan as associative_scan
from .control import fori_loop as fori_loop
from .control import map as map
from .control import scan as scan
from .control import while_loop as while_loop
