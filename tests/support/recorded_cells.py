# SPDX-License-Identifier: Apache-2.0
"""A notebook with recorded calls that go wrong: each cell is compiled under a name of its own, as IPython does it.

python recorded_cells.py FOLDER
"""

import linecache
import sys
import types

CELLS = [
    """import jax.numpy as jnp
import equinox as eqx, jax
import graftax, sys
""",
    """scale = 2.0
class Model:
    def __init__(self, w):
        self.w, self.n = w, 0
    def __call__(self, x):
        return jnp.log(self.w * x) * scale
class Net(eqx.Module):
    w: jax.Array
    def __call__(self, x):
        return jnp.sqrt(self.w * x)
double = lambda x: x * 2
""",
    """def make(k):
    def closure(model, x):
        model.n += 1
        return double(model(x) * k)
    return closure
print("computed once")
step = graftax.record(make(3.0), dir=sys.argv[1])
by_value = graftax.record(graftax.filter_jit(lambda net, x: net(x).sum()), dir=sys.argv[1])
@graftax.filter_jit
def gradient(net, x):
    return eqx.filter_grad(lambda n: n(x).sum())(net)
derivative = graftax.record(gradient, dir=sys.argv[1])
""",
    """model, net = Model(jnp.ones(2)), Net(jnp.ones(2))
for x in (1.0, 2.0, -1.0): step(model, jnp.float32(x))
for x in (1.0, 2.0, -1.0): by_value(net, jnp.float32(x))
for x in (1.0, 2.0, 0.0): derivative(net, jnp.float32(x))
for f in (step, by_value, derivative): f.flush()
""",
]


def run(number: int, text: str) -> None:
    file = f"<ipython-input-{number}-0123456789ab>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile(text, file, "exec", dont_inherit=True), vars(sys.modules["__main__"]))


if __name__ == "__main__":
    sys.modules["__main__"] = types.ModuleType("__main__")
    for number, text in enumerate(CELLS, 1):
        run(number, text)
