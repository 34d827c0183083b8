# SPDX-License-Identifier: Apache-2.0
"""Where outputs of compiled calls are: rules in the options of jit, and written arrays that stay where they were."""

from __future__ import annotations

import logging
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import graftax
from devices import run_again
from graftax._jax import fast_dispatch

P = PartitionSpec
COUNT = len(jax.devices())
pytestmark = pytest.mark.filterwarnings("ignore:.*donated buffers")
eight = pytest.mark.skipif(COUNT < 8, reason="runs in a process with eight devices")
AUTO = AxisType.Auto
MESH: Any = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AUTO, AUTO)) if COUNT == 8 else None


def placed(spec: Any) -> Any:
    return NamedSharding(MESH, spec)


class Model:
    def __init__(self) -> None:
        self.w, self.b = jnp.ones((8, 8)), jnp.zeros(8)
        self.name = "model"

    def loss(self, x: Any) -> Any:
        return ((x @ self.w + self.b) ** 2).mean()


def rules(**options: Any) -> graftax.Rules:
    return graftax.Rules([("**.w", P("data", "model")), ("**.b", None), *options.get("rules", ())], mesh=MESH)


def descend(model: Model, x: Any) -> Any:
    loss, g = graftax.value_and_grad(lambda m, x: m.loss(x))(model, x)
    model.w, model.b = model.w - 0.1 * g.w, model.b - 0.1 * g.b
    return loss


def specs(model: Model) -> list[Any]:
    return [model.w.sharding.spec, model.b.sharding.spec]


def compiled(name: str, call: Any) -> int:
    """How often a call has JAX compile the function of this name."""
    messages: list[str] = []

    class Note(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Note()
    logging.getLogger("jax").addHandler(handler)
    try:
        with jax.log_compiles():
            call()
    finally:
        logging.getLogger("jax").removeHandler(handler)
    return sum(text.startswith(f"Finished XLA compilation of jit({name})") for text in messages)


@eight
@pytest.mark.parametrize("options", [{}, {"out_shardings": "all"}, {"donate": "all"}], ids=str)
def test_written_arrays_stay_where_they_were_and_nothing_compiles_twice(options: dict[str, Any]):
    options = {k: placed(P()) if v == "all" and k == "out_shardings" else v for k, v in options.items()}
    model = Model()
    model.w, model.b = jax.device_put(model.w, placed(P(None, "data"))), jax.device_put(model.b, placed(P()))
    step = graftax.jit(descend, **options)
    x = np.ones((4, 8), np.float32)
    assert compiled("descend", lambda: [step(model, x) for _ in range(3)]) == 1
    assert specs(model) == [P(None, "data"), P()] and step.cache_info().traces == 1
    # Arrays that come differently stay as they come then.
    model.b = jax.device_put(model.b, placed(P("model")))
    step(model, x)
    step(model, x)
    assert specs(model) == [P(None, "data"), P("model")] and step.cache_info().traces == 1


@eight
def test_one_entry_takes_arrays_of_one_device_and_of_many():
    model, step = Model(), graftax.jit(descend)
    x = np.ones((4, 8), np.float32)
    step(model, x)
    model = graftax.shard(model, None, rules())
    for _ in range(40):  # some of them direct
        step(model, x)
        jax.block_until_ready(model.w)  # collectives of many calls at once wait for each other on few cores
    assert specs(model) == [P("data", "model"), P()] and step.cache_info().misses == 1


@eight
def test_a_list_that_grows_and_a_shape_that_changes_are_left_to_jax():
    state = {"seen": [jax.device_put(jnp.ones(8), placed(P("data")))], "n": jax.device_put(jnp.ones(8), placed(P()))}

    @graftax.jit
    def push(state: Any) -> None:
        state["seen"].append(state["seen"][0] * 2)
        state["n"] = jnp.ones(3)

    push(state)
    assert len(state["seen"]) == 2 and state["n"].shape == (3,)
    assert state["seen"][0].sharding.spec == P("data")


@eight
def test_symbolic_numbers_are_no_outputs():
    model = {"w": jax.device_put(jnp.ones(8), placed(P("data"))), "step": 0}

    @graftax.jit
    def step(model: Any) -> Any:
        model["w"] = model["w"] * (model["step"] + 1)
        model["step"] += 1
        return model["step"]

    assert [step(model) for _ in range(5)] == [1, 2, 3, 4, 5]
    assert model["w"].sharding.spec == P("data") and float(model["w"][0]) == 120.0


@eight
def test_rules_make_a_sharded_model():
    model = graftax.jit(Model, out_shardings=rules())()
    assert specs(model) == [P("data", "model"), P()] and model.name == "model"
    with jax.set_mesh(MESH):
        model = graftax.jit(Model, out_shardings=graftax.Rules([("w", P("model")), ("b", None)]))()
    assert specs(model) == [P("model"), P()]
    linear = graftax.jit(eqx.nn.Linear, out_shardings=graftax.Rules([("**", graftax.fsdp("data"))], mesh=MESH))
    assert linear(8, 4, key=jax.random.key(0)).weight.sharding.spec == P()
    with pytest.raises(graftax.StructureError, match=r"obj\.b: no rule selects it"):
        graftax.jit(Model, out_shardings=graftax.Rules([("w", P("model"))], mesh=MESH))()
    with pytest.raises(graftax.StructureError, match=r"the rule bias has no effect"):
        graftax.jit(Model, out_shardings=rules(rules=[("bias", None)]))()


@eight
def test_rules_say_how_arguments_come():
    first = graftax.jit(lambda model, x: (model.w * 1, x * 1), in_shardings=(rules(), placed(P("data"))))
    w, x = first(Model(), np.ones((4, 8)))
    assert w.sharding.spec == P("data", "model") and x.sharding.spec == P("data")
    named = graftax.jit(lambda model, x: (model.w * 1, x * 1), in_shardings={"model": rules(), "x": placed(P("data"))})
    assert [a.sharding.spec for a in named(Model(), np.ones((4, 8)))] == [P("data", "model"), P("data")]
    rules_of_all = graftax.Rules([("**.w", P("data")), ("**[mu]", P("data")), ("**", None)], mesh=MESH)
    for in_shardings in (rules_of_all, (rules_of_all, rules_of_all)):
        w, mu = graftax.jit(lambda m, s: (m.w * 1, s["mu"] * 1), in_shardings=in_shardings)(Model(), {"mu": np.ones(8)})
        assert w.sharding.spec == P("data") and mu.sharding.spec == P("data")


@eight
def test_written_arrays_and_the_result_by_name():
    loss = placed(P())
    trained = graftax.jit(descend, out_shardings={"model": rules(), "return": loss})
    model = Model()
    for _ in range(3):
        result = trained(model, np.ones((4, 8), np.float32))
    assert specs(model) == [P("data", "model"), P()] and result.sharding.spec == P()
    by_pattern = graftax.jit(descend, out_shardings={"model.w": placed(P("data")), "return": None})
    model = Model()
    by_pattern(model, np.ones((4, 8), np.float32))
    assert model.w.sharding.spec == P("data")
    with pytest.raises(ValueError, match=r"the pattern 'model\.weight' of out_shardings has no effect"):
        graftax.jit(descend, out_shardings={"model.weight": loss, "return": None})(Model(), np.ones((4, 8)))


@eight
def test_a_training_step_of_optax_keeps_all_of_its_state():
    params = {"b": jnp.zeros(8), "w": jnp.ones((8, 8))}
    tx = optax.adam(1e-2)
    split_rules = graftax.Rules([("**[w]", P("data", "model")), ("**", None)])
    state = graftax.shard({"params": params, "opt": tx.init(params)}, MESH, split_rules)
    before = graftax.map_leaves(lambda a: a.sharding, state)

    @graftax.jit
    def step(state: Any, x: Any) -> None:
        grads = jax.grad(lambda p: ((x @ p["w"] + p["b"]) ** 2).mean())(state["params"])
        updates, state["opt"] = tx.update(grads, state["opt"])
        state["params"] = optax.apply_updates(state["params"], updates)

    assert compiled("step", lambda: [step(state, np.ones((4, 8), np.float32)) for _ in range(3)]) == 1
    after = graftax.map_leaves(lambda a: a.sharding, state)
    assert str(before) == str(after)


@eight
def test_a_count_that_was_put_nowhere_compiles_nothing_again():
    model = graftax.jit(Model, out_shardings=rules())()
    opt = graftax.optimizer(optax.adam(1e-2), model)

    @graftax.jit
    def step(model: Any, opt: Any, x: Any) -> None:
        opt.update(model, graftax.grad(lambda m, x: m.loss(x))(model, x))

    assert compiled("step", lambda: [step(model, opt, np.ones((4, 8), np.float32)) for _ in range(40)]) == 1
    assert specs(model) == [P("data", "model"), P()] and int(opt.state[0].count) == 40


@eight
def test_lowered_and_exported_programs_have_them_too():
    model = Model()
    lowered = graftax.jit(Model, out_shardings=rules()).lower()
    assert specs(lowered.compile()()) == [P("data", "model"), P()]
    sharded = graftax.shard(model, None, rules())
    step = graftax.jit(descend).lower(sharded, np.ones((4, 8), np.float32)).compile()
    step(sharded, np.ones((4, 8), np.float32))
    assert specs(sharded) == [P("data", "model"), P()]


@eight
def test_what_is_written_keeps_its_sharding_where_it_is_returned_as_well():
    @graftax.jit
    def step(model: Any, x: Any) -> Any:
        model.w = x.T @ x + model.w[0, 0]
        return {"loss": x.sum(), "new": model.w}

    model, x = graftax.shard(Model(), None, rules()), jax.device_put(jnp.ones((8, 8)), placed(P("model")))
    for _ in range(2):
        assert step(model, x)["new"] is model.w and model.w.sharding.spec == P("data", "model")
    assert step.cache_info().traces == 1


@eight
@pytest.mark.parametrize("counts", [False, True])
def test_a_tie_of_arrays_lasts_under_in_shardings(counts: bool):
    def step(model: Any) -> None:
        model["head"] = model["layers"][0] = model["head"] * 2
        if counts:
            model["steps"] += 1  # a number that is symbolic from the second call on

    w = jnp.ones((8, 8))
    model = {"head": w, "layers": [w], "steps": 0}
    f = graftax.jit(step, in_shardings={"model": placed(P("data"))})
    for _ in range(3):
        f(model)
        assert model["layers"][0] is model["head"] and model["head"].sharding.spec == P("data")
    assert model["head"][0, 0] == 8 and f.cache_info().traces == 2  # JAX traces anew for an array that is placed


def tied() -> Model:
    model: Any = Model()
    model.layers = [model.w]
    return model


def doubled(model: Any) -> Any:
    model.w = model.layers[0] = model.w * 2
    return {"w": model.w, "again": [model.w], "b": model.b}


ROWS, COLUMNS = P("data"), P(None, "model")
TIES = {
    "one for all": (lambda: placed(ROWS), ROWS),
    "the same for both": (lambda: {"w": placed(ROWS), "again": placed(ROWS), "b": None}, ROWS),
    "nothing for one": (lambda: {"w": None, "again": [placed(ROWS)], "b": None}, ROWS),
    "patterns": (lambda: {"b": placed(P()), "**": placed(ROWS)}, ROWS),
    "two": (lambda: {"w": placed(ROWS), "again": placed(COLUMNS), "b": None}, COLUMNS),
    "two, both replicated": (lambda: {"w": placed(P()), "again": placed(P(None, None)), "b": None}, P()),
}


@eight
@pytest.mark.parametrize("donate", [None, "all"])
@pytest.mark.parametrize(("options", "second"), TIES.values(), ids=TIES)
def test_a_tie_of_arrays_lasts_under_out_shardings_where_both_places_ask_for_one(
    options: Any, second: Any, donate: Any
):
    model: Any = tied()
    f = graftax.jit(doubled, out_shardings=options(), donate=donate)
    for step in range(4):
        if step == 3:
            jax.clear_caches()  # what is traced again is tied again
        out = f(model)
        assert (out["w"] is out["again"][0]) is (second != COLUMNS)
        assert out["again"][0].sharding.spec == second
        assert out["w"].sharding.spec == (ROWS if second == COLUMNS else second)
        assert model.w is model.layers[0] and model.w[0, 0] == 2.0 ** (step + 1)


@eight
def test_written_places_that_ask_for_two_shardings_have_two_arrays():
    for of_layers in (ROWS, COLUMNS):
        model: Any = tied()
        spec = {"model.w": placed(ROWS), "model.layers": placed(of_layers), "return": None}
        f = graftax.jit(lambda model: doubled(model) and None, out_shardings=spec)
        for _ in range(3):
            f(model)
            assert (model.w is model.layers[0]) is (of_layers == ROWS)
            assert model.w.sharding.spec == ROWS and model.layers[0].sharding.spec == of_layers


@eight
def test_a_written_array_that_keeps_its_place_is_another_than_the_one_returned_elsewhere():
    model: Any = tied()
    model.w = model.layers[0] = jax.device_put(model.w, placed(COLUMNS))
    f = graftax.jit(doubled, out_shardings=placed(ROWS))
    for _ in range(3):
        out = f(model)
        assert out["w"] is out["again"][0] and out["w"].sharding.spec == ROWS
        assert model.w is model.layers[0] and model.w.sharding.spec == COLUMNS


class Bare:
    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)  # a trace that meets `vars` for the first time begins anew


@eight
def test_a_trace_that_begins_anew_runs_once_for_the_shapes_and_the_call():
    f = graftax.jit(lambda w: Bare(w=w * 2), out_shardings=Bare(w=placed(ROWS)))
    for _ in range(2):
        assert f(jnp.ones((8, 8))).w.sharding.spec == ROWS and f.cache_info().traces == 1


def replicated(array: Any) -> Any:
    return jax.device_put(array, placed(P()))


def assembled(array: Any) -> Any:
    shards = [jax.device_put(array, device) for device in MESH.devices.flat[1:]]
    return jax.make_array_from_single_device_arrays(array.shape, placed(P()), [array, *shards])


def made_by_a_callback(array: Any) -> Any:
    return jax.make_array_from_callback(array.shape, placed(P()), lambda _: array)


def one_shard(array: Any) -> Any:
    return replicated(array).addressable_shards[0].data


@eight
@pytest.mark.skipif(not fast_dispatch.counts_buffer_users(), reason="donate='auto' does not work here")
@pytest.mark.parametrize("hold", [replicated, assembled, made_by_a_callback, one_shard])
def test_an_array_on_a_mesh_holds_the_buffer_that_is_one_of_its_shards(hold):
    def double(state):
        state["w"] = state["w"] * 2

    f, state = graftax.jit(double, donate="auto"), {"w": jnp.ones(1 << 15)}
    f(state), f(state)
    held = hold(state["w"])
    f(state)
    assert not f.donation().donated
    f(state), f(state)
    assert np.asarray(held)[:2].tolist() == [4, 4] and state["w"][0] == 32


@eight
@pytest.mark.skipif(not fast_dispatch.counts_buffer_users(), reason="donate='auto' does not work here")
@pytest.mark.parametrize("place", ["first", "other", "mesh"])
def test_beside_other_devices_what_nobody_else_holds_is_donated_unasked(place):
    def double(state):
        state["w"] = state["w"] * 2

    f = graftax.jit(double, donate="auto")
    placement = {"first": jax.devices()[0], "other": jax.devices()[5], "mesh": placed(P("data"))}[place]
    state = {"w": jax.device_put(np.ones(1 << 15, "float32"), placement)}
    for _ in range(4):
        f(state)
    held = jax.device_put(state["w"], placement)
    f(state)
    report = f.donation()
    assert (report.calls_donated, report.calls_kept) == (4, 1)
    assert held[:2].tolist() == [16, 16] and state["w"][:2].tolist() == [32, 32]


@pytest.mark.quick(0)
@pytest.mark.skipif(COUNT > 1, reason="has them")
def test_all_of_this_on_eight_devices():
    run_again(__file__, 8)
