# SPDX-License-Identifier: Apache-2.0
"""`python -m graftax run` and `pytest -p graftax.replace`: programs as they are, with graftax's `jit`."""

import os
import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
import sys
from functools import partial
import jax, jax.numpy as jnp

class Counter:
    def __init__(self): self.n, self.w, self.name = 0, jnp.ones(2), "a name"

    @partial(jax.jit, static_argnames="self")
    def scaled(self, x): return x * self.w.sum()

    @jax.jit
    def step(self, x):
        self.n += 1
        return x + self.w

@jax.jit(static_argnums=1)
def power(x, n): return x ** n

numbers = iter([10.0, 20.0])
@jax.jit
def refused(x): return x + next(numbers)

counter = Counter()
for _ in range(3): counter.step(jnp.ones(2))
print(sys.argv[1:], __name__, counter.n, counter.scaled(3.0), power(3.0, 2), refused(1.0), refused(1.0))
print(jax.nn.relu(jnp.ones(())), power.lower(3.0, 2).as_text()[:6])
"""


def run(*command, cwd):
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=cwd, env=dict(os.environ))


def run_script(folder, text, is_equal=False):
    """A script under `graftax run`; `is_equal` also asks that it prints what it prints without."""
    (folder / "script.py").write_text(text)
    done = run("-m", "graftax", "run", "script.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    if is_equal:
        assert done.stdout == run("script.py", cwd=folder).stdout
    return done


def test_a_script_runs_as_it_is(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run("-m", "graftax", "run", "script.py", "--epochs", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["['--epochs', '3'] __main__ 3 6.0 9.0 11.0 11.0", "1.0 module"]
    refused, summary = done.stderr.splitlines()[-2:]
    assert refused.startswith("graftax: refused (") and "stays with jax.jit: " in refused
    assert summary == "graftax: 3 functions compiled by graftax, 1 by their own jit"


@pytest.mark.quick(0)
def test_libraries_are_patched_when_they_are_imported(tmp_path):
    (tmp_path / "script.py").write_text(
        textwrap.dedent("""
            import equinox as eqx, jax.numpy as jnp
            from flax import nnx

            @eqx.filter_jit
            def double(x): return x * 2

            @nnx.jit
            def shift(module, x): return module(x)

            layer = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
            print(repr(double)[:12], repr(shift)[:12], double(jnp.ones(())), shift(layer, jnp.ones((1, 1))).shape)
        """)
    )
    done = run("-m", "graftax", "run", "script.py", cwd=tmp_path)
    assert done.stdout.split() == ["<graftax.jit", "<graftax.jit", "2.0", "(1,", "1)"], done.stderr


@pytest.mark.quick(0)
def test_a_script_that_is_not_there_is_named(tmp_path):
    done = run("-m", "graftax", "run", "nowhere.py", cwd=tmp_path)
    assert done.returncode == 2 and "nowhere.py" in done.stderr


@pytest.mark.quick(0)
def test_a_suite_of_tests_runs_with_the_names_replaced(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import jax\n"
        "def test_it():\n"
        "    f = jax.jit(lambda x: x + 1)\n"
        "    assert 'graftax.replace.PjitFunction' in str(type(f)) and 'PjitFunction' in repr(f) and f(1) == 2\n"
    )
    done = run("-m", "pytest", "-q", "-p", "graftax.replace", "-p", "no:cacheprovider", "test_it.py", cwd=tmp_path)
    assert done.returncode == 0 and "1 functions compiled by graftax" in done.stdout, done.stdout + done.stderr


EXPORTING = """
import jax, jax.export, jax.numpy as jnp

@jax.jit
def inner(x): return x * 2

@jax.jit
def f(x): return inner(x) + 1

exported = jax.export.export(f)(jax.ShapeDtypeStruct((3,), jnp.float32))
print(exported.fun_name, jax.export.deserialize(exported.serialize()).call(jnp.ones(3)).tolist())
"""


@pytest.mark.quick(0)
@pytest.mark.parametrize("options", [(), ("--watch",)])
def test_a_script_exports_its_functions_by_jax(tmp_path, options):
    (tmp_path / "script.py").write_text(EXPORTING)
    done = run("-m", "graftax", "run", *options, "script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "f [3.0, 3.0, 3.0]"


NUMBERS = """
import jax, jax.numpy as jnp, numpy as np

@jax.jit
def half(x): return (x / 2).astype(x.dtype)

@jax.jit
def negated(x):
    if not isinstance(x, jax.Array): raise ValueError("an array is needed")
    return -x

@jax.jit
def misspelled(x): return x.shap

@jax.jit
def by_default(x, n=np.array(2)): return x if n > 1 else -x

@jax.jit
def by_value(x): return x if x > 1 else -x

@jax.jit
def doubled(x): return half(2.0) * x

print(half(3.0), half(5.0), negated(3.0), by_default(jnp.ones(())), doubled(3.0))
for wrong in misspelled, by_value:
    try: wrong(jnp.ones(()))
    except (AttributeError, jax.errors.TracerBoolConversionError): print("raised")
"""


@pytest.mark.quick(0)
def test_numbers_are_arrays_as_under_jax_jit(tmp_path):
    done = run_script(tmp_path, NUMBERS)
    assert done.stdout.splitlines() == ["1.5 2.5 -3.0 1.0 3.0", "raised", "raised"]
    lines = [line.split()[1] for line in done.stderr.splitlines() if "stays with jax.jit: " in line]
    assert lines == ["half"]  # in the trace of another, where a number is one
    assert done.stderr.splitlines()[-1] == "graftax: 6 functions compiled by graftax, 0 by their own jit"


LOWERED_FIRST = """
import itertools, jax, jax.numpy as jnp

numbers = itertools.count()
@jax.jit
def numbered(x): return x + next(numbers)

@jax.jit
def half(x): return (x / 2).astype(x.dtype)

print(numbered.lower(jnp.ones(())).as_text()[:6], numbered.eval_shape(1.0).shape)
print(half.trace(1.0).jaxpr.in_avals[0].shape, half.lower(1.0).compile()(5.0))
"""


@pytest.mark.quick(0)
def test_a_function_whose_stages_are_refused_stays_with_its_own_jit(tmp_path):
    done = run_script(tmp_path, LOWERED_FIRST)
    assert done.stdout.split() == ["module", "()", "()", "2.5"]
    lines = [line.split()[1] for line in done.stderr.splitlines() if "stays with jax.jit: " in line]
    assert lines == ["numbered"]
    assert done.stderr.splitlines()[-1] == "graftax: 1 functions compiled by graftax, 1 by their own jit"


RETURNING_NUMBERS = """
import inspect, jax, jax.numpy as jnp, numpy as np

@jax.jit
def counted(x, n):
    return {"x": x, "more": [n + 1, n > 2, None], "numpy": np.full(2, 3.0)}

first, second = counted(jnp.ones(2), 1), counted(jnp.ones(2), 2.5)
print([leaf.block_until_ready().tolist() for leaf in jax.tree.leaves((first, second))])
print(first["more"][0].weak_type, (first["more"][0] + jnp.float16(1)).dtype)
print(*inspect.signature(counted, follow_wrapped=False).parameters)
with jax.disable_jit():
    print(counted(1, 1)["more"])
"""


@pytest.mark.quick(0)
def test_numbers_in_results_and_the_signature_are_those_of_jax_jit(tmp_path):
    done = run_script(tmp_path, RETURNING_NUMBERS)
    arrays, *others = done.stdout.splitlines()
    assert arrays == "[2, False, [3.0, 3.0], [1.0, 1.0], 3.5, True, [3.0, 3.0], [1.0, 1.0]]"
    assert others == ["True float16", "x n", "[2, False, None]"]
    assert done.stdout == run("script.py", cwd=tmp_path).stdout
    assert done.stderr.splitlines() == ["graftax: 1 functions compiled by graftax, 0 by their own jit"]


OWNED = """
from functools import partial
import jax, jax.numpy as jnp

@jax.jit
def copied(params): return params

@jax.jit
def begun(w): return {"params": {"w": w}, "target": {"w": w}}

captured = jnp.arange(3.0)
@jax.jit
def given(): return {"w": captured}

@partial(jax.jit, donate_argnums=0)
def updated(params): return jax.tree.map(lambda w: w + 1, params)

params = {"w": jnp.arange(3.0)}
average = copied(params)
state = begun(params["w"])
print(updated(params), average, params["w"].is_deleted())
print(updated(state.pop("params")), state)
print(updated(given()), captured)
x = jnp.ones(2)
first, second = jax.jit(lambda x: (x, x))(x)
print(len({array.unsafe_buffer_pointer() for array in (x, first, second)}))
"""


@pytest.mark.quick(0)
def test_results_have_arrays_of_their_own_that_may_be_donated(tmp_path):
    done = run_script(tmp_path, OWNED, is_equal=True)
    assert done.stdout.splitlines()[-1] == "3"
    assert done.stderr.splitlines()[-1].endswith(" 0 by their own jit")


STEPS = """
import jax, jax.numpy as jnp

@jax.jit
def step(state, scale): return state + scale, state > 2

state = 0.0
for i in range(5): state, _ = step(state, 0.5 * i)
print(state)

@jax.jit
def repeated(x, n=3): return jnp.zeros(n) + x

print(repeated(1.0), repeated(2.0))
for mistake in (
    lambda: jax.jit(step.__wrapped__, static_argnames="stat"),
    lambda: jax.jit(lambda x: x, static_argnames="x", donate_argnames="x"),
    lambda: jax.jit(staticmethod(lambda x: x)),
    lambda: jax.jit(3),
):
    try: mistake()
    except (TypeError, ValueError) as error: print(type(error).__name__, str(error).partition("<")[0])
"""


@pytest.mark.quick(0)
def test_programs_of_numbers_and_mistakes_in_options_are_those_of_jax_jit(tmp_path):
    done = run_script(tmp_path, STEPS, is_equal=True)
    assert len(done.stdout.splitlines()) == 6
    assert done.stderr.splitlines() == ["graftax: 2 functions compiled by graftax, 0 by their own jit"]


DONATED = """
from functools import partial
import jax, jax.numpy as jnp, numpy as np

@partial(jax.jit, donate_argnums=0)
def trained(state, x):
    state["n"] += 1
    return {**state, "w": state["w"] + x}

state = first = {"w": jnp.zeros(1000), "n": jnp.zeros(()), "kept": jnp.ones(1000)}
print(trained.lower(state, 1.0).compile().memory_analysis().alias_size_in_bytes)
for x in range(3): state = trained(state, 0.5 * x)
print(jax.tree.map(lambda leaf: (float(leaf.sum()), leaf.is_deleted()), state), first["kept"].is_deleted())
"""


@pytest.mark.quick(0)
def test_a_donated_array_gives_its_memory_to_the_result(tmp_path):
    done = run_script(tmp_path, DONATED, is_equal=True)
    assert done.stdout.splitlines()[0] == "8004"
    assert done.stderr.splitlines() == ["graftax: 1 functions compiled by graftax, 0 by their own jit"]


REPLACED_AGAIN = """
import jax, jax.numpy as jnp

replaced, calls = jax.jit, []

def counting(function, **options):
    compiled = replaced(function, **options)
    def call(*args, **kwargs):
        calls.append(function.__name__)
        return compiled(*args, **kwargs)
    return call

jax.jit = counting
@jax.jit
def f(x): return x * 2

print(f(jnp.ones(())), f(jnp.ones(())), calls)
jax.jit = lambda function: function  # as chex.fake_jit does
print(f(jnp.ones(2)), jax.jit(lambda x: type(x))(3))
"""


@pytest.mark.quick(0)
def test_a_program_may_put_its_own_function_in_the_place_of_jax_jit(tmp_path):
    done = run_script(tmp_path, REPLACED_AGAIN)
    assert done.stdout.splitlines() == ["2.0 2.0 ['f', 'f']", "[2. 2.] <class 'int'>"]


COUNTING = """
import jax, jax.numpy as jnp
from flax import nnx

traces, kept, cache = [], [], {}

@jax.jit
def appending(x):
    traces.append(None)
    return x * 2

@jax.jit
def looking_up(x):
    if x.shape not in cache: cache[x.shape] = len(x.shape)
    return x * cache[x.shape]

@jax.jit
def keeping(x):
    kept.append(x * 2)
    return x

def count():
    n = 0
    @jax.jit
    def outer(x): return inner(x) + 1
    @jax.jit
    def inner(x):
        nonlocal n
        n += 1
        return x
    @nnx.jit
    def apply(layer, x):
        nonlocal n
        n += 1
        return layer(x)
    layer = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    for x in range(3): outer(jnp.ones((1, 1)) * x), apply(layer, jnp.ones((1, 1)))
    return n

for x in range(3): appending(1.0 * x), looking_up(jnp.ones(2))
print(jax.grad(appending)(1.0), len(traces), cache, count())
for x in range(3): keeping(1.0 * x)
"""


@pytest.mark.quick(0)
def test_a_function_that_counts_its_traces_stays_with_its_own_jit(tmp_path):
    done = run_script(tmp_path, COUNTING, is_equal=True)
    assert done.stdout.split() == ["2.0", "1", "{(2,):", "1}", "2"]
    *lines, summary = done.stderr.splitlines()
    names = [line.split()[1] for line in lines if "which it captures" in line]
    assert sorted(set(names)) == ["appending", "apply", "inner", "looking_up", "outer"]
    assert "global traces" in lines[0]
    # What `jax.jit` would leave in `kept` are tracers: `keeping` is no such function.
    assert summary.endswith(", 5 by their own jit")
