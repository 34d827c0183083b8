# SPDX-License-Identifier: Apache-2.0
"""`graftax.filter_jit`: any object, by value."""

import functools

from benchmarks.subjects import by_hand
from benchmarks.subjects.graftax_jit import DISTRIBUTION as DISTRIBUTION
from benchmarks.subjects.graftax_jit import accepts as accepts
from benchmarks.subjects.graftax_jit import flatten as flatten
from benchmarks.subjects.graftax_jit import replay as replay
from benchmarks.subjects.graftax_jit import taken_as as taken_as
from benchmarks.subjects.graftax_jit import unflatten as unflatten
from graftax import filter_jit as jit
from graftax import filter_value_and_grad

NAME = "graftax.filter_jit"

value_and_grad = filter_value_and_grad
in_place = functools.partial(by_hand, jit)
