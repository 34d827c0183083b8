# SPDX-License-Identifier: Apache-2.0
"""A session in a notebook with classes, hyperparameters, lambdas in loops and a module that is reloaded.

After each of forty edits every result is that of plain Python, and only what changed is compiled.
"""

import importlib
import sys
import types

import jax
import jax.numpy as jnp
import pytest

import graftax
from compilations import compilations

FUNCTIONS = ("train", "predict", "method", "<lambda>")

LAYERS = """
import jax.numpy as jnp

{comment}
def dense(layer, x):
    return jnp.{activation}(x @ layer.w + layer.b)
"""

LAYER = """
@dataclasses.dataclass
class Layer:
    '''{doc}'''
    w: object
    b: object
    name: str = "layer"

    def __call__(self, x):
        return layers.dense(self, x) * {factor}
"""

MODEL = """
class Model:
    # {comment}
    def __init__(self, sizes=(4, 3, 2)):
        pairs = zip(sizes, sizes[1:])
        self.layers = [Layer(jnp.full(shape, 0.1, "float32"), jnp.zeros(shape[1])) for shape in pairs]
        self.steps = 0

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    @jit
    def method(self, x):
        return self(x){more}
"""

OPTIMIZER = """
class SGD:
    def __init__(self, rate, decay=0.0):
        self.rate, self.decay = rate, decay

    def update(self, w, g):
        return w - self.rate * (g + self.decay * w)
"""

TRAIN = """
def loss_of(ws, model, x, y):
    for layer, (w, b) in zip(model.layers, ws):
        layer.w, layer.b = w, b
    return jnp.mean((model(x) - y) ** 2)

@jit
def train(model, optimizer, x, y):
    ws = [(layer.w, layer.b) for layer in model.layers]
    loss, gs = jax.value_and_grad(loss_of)(ws, model, x, y)
    for layer, w, g in zip(model.layers, ws, gs):
        layer.w, layer.b = optimizer.update(w[0], g[0]), optimizer.update(w[1], g[1])
    model.steps += 1  # {comment}
    return loss
"""

PREDICT = """
@jit
def predict(model, x, mode="mean"):
    y = model(x)
    assert isinstance(model, Model)
    return y.mean() if mode == "mean" else y{index}
"""

SETUP = "x, y = jnp.ones((5, 4)), jnp.zeros((5, 2))\nmodel, optimizer = Model(), SGD(0.1)\n"
STEP = "out = [float(train(model, optimizer, x, y)) for _ in range(2)]\n"
ASK = "out = [jnp.asarray(predict(model, x)).tolist()]\n"
LOOP = "out = [jit(lambda x: x.sum() * {factor} + k)(x).item() for k in range(3)]\n"
RELOAD = "importlib.reload(layers)\n"

# (what is written to the module of layers, or None; the cell; how many programs it compiles)
SESSION = [
    (None, LAYER.format(doc="a layer", factor=1) + MODEL.format(comment="a model", more="") + OPTIMIZER, 0),
    (None, TRAIN.format(comment="count") + PREDICT.format(index="[0]") + SETUP, 0),
    (None, STEP, 1),  # the number of steps is seen to change, and is symbolic from the first call on
    (None, STEP, 0),
    (None, TRAIN.format(comment="count the steps"), 0),
    (None, STEP, 0),
    (None, "optimizer.rate = 0.2\n" + STEP, 1),  # the rate is symbolic from now on
    (None, "optimizer.rate = 0.3\n" + STEP, 0),
    (None, "optimizer = SGD(0.05)\n" + STEP, 0),
    (None, MODEL.format(comment="the same model", more=""), 0),
    (None, "model = Model()\n" + STEP, 0),
    (None, ASK, 1),
    (None, PREDICT.format(index="[0]") + ASK, 0),
    (None, LAYER.format(doc="one layer", factor=1) + "model = Model()\n" + STEP, 0),
    (None, ASK, 0),
    (None, "out = predict(model, x, 'rows').tolist()", 1),
    (None, PREDICT.format(index="[1]") + "out = predict(model, x, 'rows').tolist()", 1),
    (None, ASK, 0),
    (None, "out = model.method(x).tolist()", 1),
    # there are other steps for this method: symbolic from now on, an input that the program had not
    (None, MODEL.format(comment="once more", more="") + "model = Model()\nout = model.method(x).tolist()", 1),
    (None, MODEL.format(comment="twice", more=" * 2") + "model = Model()\nout = model.method(x).tolist()", 1),
    (None, STEP + ASK, 0),
    (("# a comment", "tanh"), RELOAD + STEP, 0),
    (None, ASK, 1),  # the steps again
    (("# the sine", "sin"), RELOAD + STEP, 1),
    (None, ASK, 1),
    (("# tanh, as before", "tanh"), RELOAD + STEP + ASK, 0),
    (None, LOOP.format(factor=2), 2),
    (None, LOOP.format(factor=2), 0),
    (None, LOOP.format(factor=3), 2),
    (None, LOOP.format(factor=2), 0),
    (None, OPTIMIZER, 0),
    (None, "optimizer = SGD(0.1)\n" + STEP, 0),
    (None, "optimizer = SGD(0.2)\n" + STEP, 0),
    (None, "optimizer = SGD(0.2, decay=0.5)\n" + STEP, 1),
    (None, "optimizer = SGD(0.2, decay=0.25)\n" + STEP, 0),
    (None, LAYER.format(doc="a layer", factor=2) + "model = Model()\n" + STEP, 1),
    (None, LAYER.format(doc="a layer", factor=1) + "model = Model()\n" + STEP, 0),
    (None, "model.layers[0].name = 'first'\n" + STEP, 0),
    (None, "model = Model((4, 8, 2))\n" + STEP, 1),
    (None, "model = Model()\n" + STEP + ASK, 0),
    (None, "x, y = jnp.ones((7, 4)), jnp.zeros((7, 2))\n" + STEP, 1),
    (None, TRAIN.format(comment="the last edit") + STEP, 0),
]


def plain(function):
    return function


@pytest.fixture
def layers(monkeypatch, tmp_path):
    """Writes the module that the session imports."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)

    def write(comment, activation):
        (tmp_path / "layers_of_a_session.py").write_text(LAYERS.format(comment=comment, activation=activation))
        importlib.invalidate_caches()

    write("# the layers", "tanh")
    yield write
    sys.modules.pop("layers_of_a_session", None)


def notebook(monkeypatch, jit):
    module = types.ModuleType(f"notebook_of_classes_{jit.__name__}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    vars(module).update(jit=jit)
    exec("import dataclasses, importlib, jax, jax.numpy as jnp, layers_of_a_session as layers", vars(module))
    return vars(module)


def state(scope):
    model = scope.get("model")
    if model is None:
        return []
    return [model.steps, *(a.tolist() for layer in model.layers for a in (layer.w, layer.b))]


@pytest.mark.quick(0)  # test_equal_programs.py has the parts
@pytest.mark.filterwarnings("ignore::graftax.RecompileWarning")
def test_an_edit_compiles_only_what_it_changes(monkeypatch, layers):
    compiled, expected = notebook(monkeypatch, graftax.jit), notebook(monkeypatch, plain)
    assert len(SESSION) >= 40
    counts = []
    for number, (written, cell, _) in enumerate(SESSION):
        if written is not None:
            layers(*written)
        code = compile(cell, f"<cell {number}>", "exec")
        exec(code, expected)
        with compilations(*FUNCTIONS) as names:
            exec(code, compiled)
        counts.append(len(names))
        leaves = [jax.tree.leaves([scope.get("out"), state(scope)]) for scope in (compiled, expected)]
        assert jnp.allclose(jnp.asarray(leaves[0]), jnp.asarray(leaves[1]), rtol=1e-4, atol=1e-6), f"{number}: {cell}"
    assert counts == [wanted for *_, wanted in SESSION]
