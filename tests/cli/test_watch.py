# SPDX-License-Identifier: Apache-2.0
"""`python -m graftax run --watch`: a program runs as it is, and what graftax would change is said."""

import gc
import html
import os
import subprocess
import sys
import weakref
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import graftax
import graftax.replace
from graftax._cli import notebook
from graftax._cli.watch import page, record
from graftax._cli.watch.watched import Watch
from graftax.replace import Replacement


@pytest.fixture
def watch():
    watch = Watch()
    watch.start()
    yield watch
    watch.stop()


def seen(watch, name):
    (only,) = (known for known in watch.records.values() if known.name == name)
    return only


def texts(known):
    return " | ".join(seen for seen, _, _ in known.findings())


def test_names_are_their_own_before_and_after():
    own = jax.jit, eqx.filter_jit, nnx.jit
    watch = Watch()
    watch.start()
    assert jax.jit is not own[0]
    watch.stop()
    assert (jax.jit, eqx.filter_jit, nnx.jit) == own


def test_calls_and_compilations_are_counted_with_their_causes(watch):
    @jax.jit
    def f(x):
        return x + 1

    for shape in (2, 2, 2, 3):
        assert f(jnp.ones(shape)).shape == (shape,)
    known = seen(watch, "f")
    assert known.calls == 4 and known.median_microseconds > 0 and known.walk_nanoseconds > 0
    assert [c.cause for c in known.compilations] == ["the first call", "x was float32[2], is float32[3]"]
    assert known.seconds > 0 and not known.findings()


def test_a_function_that_is_made_anew_is_one_that_graftax_would_compile_once(watch):
    for _ in range(3):
        jax.jit(lambda x: x * 2)(jnp.ones(2))
    assert "2 compilations" in texts(seen(watch, "<lambda>"))


def test_one_function_jitted_twice_is_compiled_once_as_without_watching(watch):
    def twice(x):
        return x * 2

    for _ in range(2):
        jax.jit(twice)(jnp.ones(2))
    assert len(seen(watch, "twice").compilations) == 1


class Model:
    def __init__(self):
        self.calls, self.scale = 0, 2.0

    @property
    def apply(self):
        return jax.jit(Model.run, static_argnums=0)

    def run(self, x):
        self.calls += 1
        return x * self.scale


def test_statics_that_are_stale_and_changes_that_are_made_once(watch):
    model = Model()
    apply = model.apply
    assert apply(model, 1.0) == 2
    model.scale = 5.0
    assert apply(model, 1.0) == 2  # as without watching
    assert "self.scale was 2.0, is 5.0" in texts(seen(watch, "run"))
    assert "self.calls was 0, is 1" in texts(seen(watch, "run"))


def test_captured_values_that_are_stale_and_arrays_that_are_constants(watch):
    table, factor = np.ones(1000, np.float32), 2.0

    @jax.jit
    def f(x):
        return x * factor + table.sum()

    assert f(1.0) == 1002
    factor = 3.0
    assert f(1.0) == 1002
    assert seen(watch, "f").constants == {"table": 4000} and "factor was 2.0, is 3.0" in texts(seen(watch, "f"))


real = jnp.ones(3)


def test_an_attribute_with_the_name_of_a_global_is_no_captured_value(watch):
    global real

    @jax.jit
    def f(x):
        return x.real * 2

    f(real)
    real = real + 1
    f(real)
    assert not seen(watch, "f").constants and not seen(watch, "f").findings()


def test_changes_of_arguments_ties_and_donations(watch):
    @jax.jit
    def step(state):
        state["calls"] = state["calls"] + 1
        return {name: value - 1 for name, value in state.items()}

    shared = jnp.ones((10, 10))
    state = {"a": shared, "b": shared, "calls": jnp.zeros(())}
    del shared
    for _ in range(3):
        state = step(state)
    known = seen(watch, "step")
    assert "state['calls']" in texts(known) and known.lost_ties == {"result['a'] and result['b']": 400}
    assert known.missed_donation >= 804 and known.missed_donations == 2


def test_watching_keeps_no_array_alive(watch):
    f = jax.jit(lambda x: x + captured.sum())
    captured, x = jnp.ones(3), jnp.ones(3)
    f(x)
    kept = weakref.ref(x)
    del x
    gc.collect()
    assert kept() is None


def test_filter_jit_and_nnx_jit_are_watched_too(watch):
    @eqx.filter_jit
    def of_equinox(layer, x):
        return layer(x)

    @nnx.jit
    def of_nnx(layer, x):
        layer.count = nnx.Variable(jnp.zeros(()))
        return layer(x)

    of_equinox(eqx.nn.Linear(2, 2, key=jax.random.key(0)), jnp.ones(2))
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    of_nnx(layer, jnp.ones((1, 2)))
    assert layer.count[...] == 0 and not seen(watch, "of_nnx").findings()
    assert len(seen(watch, "of_equinox").compilations) == len(seen(watch, "of_nnx").compilations) == 1


def test_what_runs_inside_of_another_trace_and_what_raises_is_left_alone(watch):
    inner = jax.jit(lambda x: x + 1)
    assert jax.grad(lambda x: inner(x) ** 2)(1.0) == 4 and jax.jit(lambda x: inner(x))(1.0) == 2
    with pytest.raises(ZeroDivisionError):
        jax.jit(lambda x: x / (1 // 0))(1.0)
    assert jax.jit(partial(jnp.add, 1))(1) == 2  # no Python function of its own


def test_the_page_escapes_what_a_program_names_and_stands_alone(watch):
    def f(x):
        return x[key]

    f.__name__ = "<script>alert(1)</script>"
    key, f = "<b>", jax.jit(f)
    f({key: jnp.ones(2)})
    f({key: jnp.ones(3)})
    text = page.page(watch.records, "<i>.py")
    assert "<script" not in text and "<b>" not in text and "<i>" not in text and html.escape("<b>") in text
    assert "http" not in text and "src=" not in text and "float32[3]" in text and "µs" in text
    assert "1 function, 2 calls, 2 compilations" in record.summary(watch.records)


@pytest.mark.quick(0)
def test_the_command_writes_a_page_and_the_script_runs_as_it_is(tmp_path):
    (tmp_path / "script.py").write_text(
        "import sys, jax, jax.numpy as jnp\n"
        "f = jax.jit(lambda x: x + 1)\n"
        "print(sys.argv[1:], f(1), f(1), 'graftax' in repr(f))\n"
    )
    command = [sys.executable, "-m", "graftax", "run", "--watch", "--report", "page.html", "script.py", "--watch", "a"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=dict(os.environ))
    assert done.returncode == 0 and done.stdout == "['--watch', 'a'] 2 2 False\n", done.stderr
    assert "graftax --watch: 1 function, 2 calls, 1 compilation in" in done.stderr
    assert "script.py:2" in (tmp_path / "page.html").read_text(encoding="utf-8")


class Shell:
    def __init__(self):
        self.magics = {}

    def register_magic_function(self, function, magic_name):
        self.magics[magic_name] = function


def test_the_extension_of_ipython_replaces_the_names_and_watches(tmp_path, capsys):
    own, shell = jax.jit, Shell()
    graftax.load_ipython_extension(shell)
    magic = shell.magics["graftax"]
    try:
        assert isinstance(jax.jit(lambda x: x), Replacement)
        magic("watch")
        f = jax.jit(lambda x: x)
        assert "graftax" not in repr(f) and f(1) == 1
        magic("")
        magic(f"report {tmp_path / 'page.html'}")
        assert "1 function, 1 call" in capsys.readouterr().out and (tmp_path / "page.html").exists()
        magic("off")
        assert jax.jit is own and not notebook._watches
        magic("replace")
        assert jax.jit is not own
    finally:
        graftax.unload_ipython_extension(shell)
    assert jax.jit is own
    with pytest.raises(AttributeError, match="no attribute 'loads'"):
        _ = graftax.loads
