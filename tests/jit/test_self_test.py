# SPDX-License-Identifier: Apache-2.0
"""The checks before the first direct call: whatever JAX has or gives otherwise than was expected, they see."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from graftax._jax import fast_dispatch, settings

OTHERWISE = {
    "a type": np.asarray,
    "a dtype": lambda x: x.astype("int16" if x.dtype == "int32" else "float16"),
    "a place": lambda x: jax.device_put(x, jax.sharding.NamedSharding(jax.make_mesh((1,), ("x",)), P())),
    "a weak type": lambda x: x.astype(int) * 1.0,
    "a commitment": lambda x: jax.device_put(x, jax.devices()[0]),
    "values": lambda x: x + 1,
}


@pytest.mark.parametrize("otherwise", OTHERWISE.values(), ids=OTHERWISE)
@pytest.mark.quick(6)
def test_the_self_test_sees_a_result_that_differs_in_one_thing(otherwise, monkeypatch):
    captured = fast_dispatch._capture_executable

    class Results:
        def __init__(self, results):
            self.results = results

        def consume_with_handlers(self, handlers):
            first, *others = self.results.consume_with_handlers(handlers)
            return [otherwise(first), *others]

    def changed(*args, **kwargs):
        execute, *parts = captured(*args, **kwargs)
        return lambda arrays: Results(execute(arrays)), *parts

    fast_dispatch._self_test()
    monkeypatch.setattr(fast_dispatch, "_capture_executable", changed)
    with pytest.raises(RuntimeError, match="found"):
        fast_dispatch._self_test()


def test_a_trace_state_that_is_another_one_is_seen(monkeypatch):
    from jax._src import core

    class Restless:
        value = property(lambda self: object())

    assert fast_dispatch._private_names()
    monkeypatch.setattr(core, "trace_state_strong_ref", Restless(), raising=False)
    with pytest.raises(RuntimeError, match="found"):
        fast_dispatch._private_names()


def test_settings_of_which_nobody_would_tell_are_asked_for_on_each_call(monkeypatch):
    monkeypatch.setattr(settings, "_setting_objects", dict)
    assert not settings.follow_settings()
