# SPDX-License-Identifier: Apache-2.0
"""`jit(..., branches_ahead=True)`: what tests on numbers did not choose is compiled before a call comes to it."""

import enum
import logging
import subprocess
import sys
import threading
import warnings
import weakref

import jax
import jax.numpy as jnp
import pytest

import graftax
from compilations import compilations
from graftax._capture.numbers.branch_numbers import other_answers
from graftax._capture.numbers.host_program import HostProgram
from graftax._jit import branches_ahead

ANNOUNCED: list[int] = []
SCALE = {"late": 3.0}
LOG = logging.getLogger("test_branches_ahead")
hears_calls = pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.11 does not report calls")


class Model:
    def __init__(self):
        self.w, self.steps, self.rate, self.left, self.log = jnp.ones(3), 0, 1.0, 9, []


def warms_up(model, x):
    model.steps += 1
    model.w = model.w + (x * model.steps if model.steps < 3 else x)
    return model.w.sum()


def has_phases(model, x):
    model.steps += 1
    if model.steps < 3:
        model.w = model.w + x
    elif model.steps < 5:
        model.w = model.w * 2
    else:
        model.w = model.w - x * model.steps
    return model.w.sum()


def now_and_then(model, x):
    model.steps += 1
    if model.steps % 4 == 0:
        model.w = model.w * 0.5
    model.w = model.w + x
    return model.w.sum()


def counts_down(model, x):
    model.left -= 1
    if model.left > 6:
        model.w = model.w + x
    return model.w.sum()


def decays(model, x):
    model.rate *= 0.5
    model.w = model.w + (x * model.rate if model.rate > 0.1 else x)
    return model.w.sum()


def scaled(x):
    return x * SCALE["late"]


def reads_more(model, x):
    model.steps += 1
    model.w = scaled(model.w) if model.steps >= 3 else model.w + x
    return model.w.sum()


class Mode(enum.Enum):
    train = 1


class Totals:
    steps = 0


def counts_in_a_class(model, x):
    model.steps += 1
    if model.steps >= 3:
        Totals.steps += 1
        model.w = model.w + Totals.steps
    return model.w.sum()


def at_once(model, x):
    if model.steps == 0:
        model.w = model.w * 10
    model.steps += 1
    model.w = model.w + x
    return model.w.sum()


FUNCTIONS = {  # programs in all
    **{warms_up: 2, has_phases: 3, now_and_then: 2, counts_down: 2},
    **{decays: 2, reads_more: 2, at_once: 2},
}


@pytest.fixture(autouse=True)
def fresh_programs():
    """Each `jit` of a function with the same options shares its programs."""
    yield
    for function in (*FUNCTIONS, counts_in_a_class, announces, hides_it, *STOPS):
        vars(function).clear()


def state_of(model):
    return model.w.tolist(), model.steps, model.rate, model.left, model.log


@hears_calls
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_later_calls_trace_and_compile_nothing(function):
    step = graftax.jit(function, branches_ahead=True)
    model, plain = Model(), Model()
    assert step(model, jnp.ones(3)) == function(plain, jnp.ones(3))
    traces = step.cache_info().traces
    wait(step)
    with compilations(function.__name__) as compiled:
        for i in range(8):
            assert step(model, i * jnp.ones(3)) == function(plain, i * jnp.ones(3))
            assert state_of(model) == state_of(plain)
    assert (compiled, step.cache_info().traces) == ([], traces)
    assert step.cache_info().currsize == FUNCTIONS[function]


def wait(step):
    for entry in list(step._table.entries.values()):
        step._table.ahead.use(step, entry)
    assert step.cache_info().compiling == 0


@hears_calls
def test_a_branch_that_changes_what_only_it_reads():
    step = graftax.jit(counts_in_a_class, branches_ahead=True)
    model, plain = Model(), Model()
    for i in range(5):
        before = Totals.steps
        expected = counts_in_a_class(plain, jnp.ones(3))
        Totals.steps, after = before, Totals.steps
        assert step(model, jnp.ones(3)) == expected
        assert (Totals.steps, model.steps) == (after, i + 1)
    Totals.steps = 0


@hears_calls
def test_nothing_is_made_for_a_structure_that_no_call_had():
    def logs(model, x):
        model.steps += 1
        model.log.append(model.steps < 5)
        return x * model.steps

    step, model = graftax.jit(logs, branches_ahead=True), Model()
    assert [step(model, jnp.ones(1)).item() for _ in range(3)] == [1, 2, 3]
    assert step.cache_info().traces == 3


@hears_calls
def test_a_number_that_the_caller_counts():
    step = graftax.jit(lambda w, i: w * 2 if i < 4 else w + i, branches_ahead=True)
    w, traces = jnp.ones(2), []
    for i in range(7):
        w = step(w, i)
        traces.append(step.cache_info().traces)
    assert w.tolist() == [2.0**4 + 4 + 5 + 6] * 2
    assert traces == [1, 3, 3, 3, 3, 3, 3]  # the first call cannot know that it changes


def announces(model, x):
    model.steps += 1
    if model.steps % 3 == 0:
        announce(model.steps)
    model.w = model.w + x


def announce(step):
    ANNOUNCED.append(step)
    print("step", step)


def hides_it(model, x):
    try:
        announces(model, x)
    except BaseException:
        model.w = model.w + 1


def stops_with(error):
    def stops(model, x):
        model.steps += 1
        if model.steps >= 3:
            raise error(model.steps)
        model.w = model.w + x

    return stops


STOPS = list(map(stops_with, (StopIteration, GeneratorExit, KeyboardInterrupt)))


@pytest.mark.filterwarnings("ignore::graftax.ImpureCallWarning")
@pytest.mark.parametrize(
    "function", [announces, hides_it, *STOPS], ids=["announces", "hides_it", "stop", "exit", "interrupt"]
)
def test_what_only_the_call_may_do_is_left_to_it(function, capsys):
    step = graftax.jit(function, branches_ahead=True)
    model, plain, texts = Model(), Model(), []
    for _ in range(3):
        raised = []
        for f, m in ((step, model), (function, plain)):
            try:
                f(m, jnp.ones(3))
                raised.append(None)
            except (StopIteration, GeneratorExit, KeyboardInterrupt) as error:
                raised.append((type(error), *error.args))
            texts.append((capsys.readouterr().out, len(ANNOUNCED)))
        assert raised[0] == raised[1]
        assert model.w.tolist() == plain.w.tolist()
    assert [text for text, _ in texts[::2]] == [text for text, _ in texts[1::2]]
    ANNOUNCED.clear()


def imports(model, x):
    model.steps += 1
    if model.steps == 3:
        from colorsys import ONE_THIRD  # a module that nothing else loads

        x = x * ONE_THIRD
    model.w = model.w + x


def changes_a_logger(model, x):
    model.steps += 1
    if model.steps == 3:
        LOG.disabled = True
    model.w = model.w + x


def changes_its_logger(model, x):
    model.steps += 1
    if model.steps == 3:
        model.logger.disabled = True
    model.w = model.w + x


def changes_a_member(model, x):
    model.steps += 1
    if model.steps == 3:
        Mode.train.used = True
    model.w = model.w + x


def lets_print_be_called(model, x):
    model.steps += 1
    if model.steps == 3:
        weakref.finalize(Model(), print, "gone")
    model.w = model.w + x


def asks_for_64_bits(model, x):
    model.steps += 1
    model.w = model.w + (jnp.zeros(3, jnp.float64) if model.steps == 3 else x)


@pytest.mark.quick(8)
@pytest.mark.filterwarnings("ignore::graftax.ImpureCallWarning")
@pytest.mark.parametrize(
    "function",
    [imports, changes_a_logger, changes_its_logger, changes_a_member, lets_print_be_called, asks_for_64_bits],
)
def test_what_is_no_call_is_left_to_the_call(function, monkeypatch, capsys):
    finders = [finder for finder in sys.meta_path if "pytest" not in type(finder).__module__]  # they call open
    monkeypatch.setattr(sys, "meta_path", finders)
    runs = []
    for f in (function, graftax.jit(function, branches_ahead=True)):
        sys.modules.pop("colorsys", None)
        LOG.disabled = False
        vars(Mode.train).pop("used", None)
        model = Model()
        model.logger = LOG
        runs.append([])
        for i in range(3):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                f(model, i * jnp.ones(3))
            texts = {str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)}
            effects = (
                capsys.readouterr().out,
                LOG.disabled,
                "used" in vars(Mode.train),
                "colorsys" in sys.modules,
                texts,
            )
            runs[-1].append((state_of(model), *effects))
    assert runs[0] == runs[1]


def goes_around_often(model, x):
    model.steps += 1
    for _ in range(model.steps if model.steps >= 10**9 else 1):
        x = x * 2
    model.w = model.w + x


def raises_to_it(model, x):
    model.steps += 1
    model.w = model.w + (x * (2**model.steps % 7) if model.steps >= 10**9 else x)


def counts_for_ever(model, x):
    model.steps += 1
    i = 0
    while model.steps >= 5 and i < 10**12:
        i += 1
    model.w = model.w + x


@pytest.mark.quick(8)
@pytest.mark.parametrize("function", [goes_around_often, raises_to_it, counts_for_ever])
def test_what_takes_long_for_other_numbers_is_left_to_them(function, monkeypatch):
    monkeypatch.setattr(branches_ahead, "_LEAST_SECONDS", 0)
    step = graftax.jit(function, branches_ahead=True)
    model, plain = Model(), Model()
    for i in range(3):
        step(model, i * jnp.ones(3))
        function(plain, i * jnp.ones(3))
        assert state_of(model) == state_of(plain)
    assert step.cache_info().traces == 1


@hears_calls
def test_a_call_waits_for_the_program_that_it_needs(monkeypatch):
    may_go, compile_now = threading.Event(), jax.stages.Lowered.compile

    def compile_later(lowered, *args, **kwargs):
        if threading.current_thread().name.startswith("graftax compiles"):
            assert may_go.wait(120)
        return compile_now(lowered, *args, **kwargs)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_later)
    step = graftax.jit(warms_up, branches_ahead=True)
    model, plain = Model(), Model()
    for i in range(2):
        assert step(model, i * jnp.ones(3)) == warms_up(plain, i * jnp.ones(3))
    assert step.cache_info().compiling == 1
    assert "compiling in the background" in str(graftax.explain(step))
    threading.Timer(0.05, may_go.set).start()
    with compilations("warms_up") as compiled:
        assert step(model, jnp.ones(3)) == warms_up(plain, jnp.ones(3))
    assert len(compiled) == 1
    assert step.cache_info().compiling == 0
    assert "made before a call needed it" in str(graftax.explain(step))


@hears_calls
def test_a_compiler_that_fails_is_left_to_the_call(monkeypatch):
    compile_now = jax.stages.Lowered.compile

    def fail(lowered, *args, **kwargs):
        if threading.current_thread().name.startswith("graftax compiles"):
            raise RuntimeError("no space")
        return compile_now(lowered, *args, **kwargs)

    monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
    step = graftax.jit(has_phases, branches_ahead=True)
    model, plain = Model(), Model()
    for i in range(6):
        assert step(model, i * jnp.ones(3)) == has_phases(plain, i * jnp.ones(3))


@hears_calls
def test_where_there_are_no_more_threads_a_call_compiles(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    step = graftax.jit(has_phases, branches_ahead=True)
    model, plain = Model(), Model()
    for i in range(6):
        assert step(model, i * jnp.ones(3)) == has_phases(plain, i * jnp.ones(3))
        assert "compiling in the background" not in str(graftax.explain(step))


@hears_calls
def test_a_trace_ahead_is_no_call():
    step, model = graftax.jit(reads_more, branches_ahead=True), Model()
    for i in range(5):
        step(model, jnp.ones(3))
        info = step.cache_info()
        assert info.hits + info.misses == graftax.explain(step).calls == i + 1


@hears_calls
@pytest.mark.quick(0)
def test_a_call_at_the_end_of_python(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import atexit\n" + SCRIPT.replace('if __name__ == "__main__":', "@atexit.register\ndef end():"))
    python = [sys.executable, str(script), str(tmp_path)]
    printed = subprocess.run(python, capture_output=True, text=True, check=True).stdout
    assert printed.startswith("[6.0, 12.0, 15.0, 18.0]")


@hears_calls
@pytest.mark.parametrize(
    "options",
    [{"donate": "auto"}, {"donate": "all"}, {"background": True}, {"mutation": "discard"}, {"record": True}],
    ids=lambda options: next(iter(options)) + str(next(iter(options.values()))),
)
def test_with_other_options(options):
    step = graftax.jit(warms_up, branches_ahead=True, **options)
    model, plain = Model(), Model()
    for i in range(5):
        if options.get("mutation") == "discard":
            plain.w, plain.steps = model.w, model.steps
        assert step(model, i * jnp.ones(3)) == warms_up(plain, i * jnp.ones(3))
        if options.get("mutation") == "discard":
            model.steps += 1
    assert step.cache_info().traces == 2
    wait(step)


def test_a_frozen_function_traces_nothing_ahead():
    ahead = graftax.jit(warms_up, branches_ahead=True)
    ahead.warm([(Model(), jnp.ones(3))])
    ahead.freeze()
    ahead(Model(), jnp.ones(3))
    assert ahead.cache_info().traces == 1


SCRIPT = """
import sys, jax.numpy as jnp, graftax

graftax.cache(sys.argv[1], min_seconds=0)

class Model:
    def __init__(self):
        self.w, self.steps = jnp.ones(3), 0

@graftax.jit(branches_ahead=True)
def step(model, x):
    model.steps += 1
    model.w = model.w + (x * model.steps if model.steps < 3 else x)
    return model.w.sum()

if __name__ == "__main__":
    model = Model()
    print([float(step(model, jnp.ones(3))) for _ in range(4)], step.cache_info().traces, step.cache_info().disk)
"""


@hears_calls
@pytest.mark.quick(0)
def test_the_cache_on_disk_has_the_programs_that_calls_have_used(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    printed = [
        subprocess.run(
            [sys.executable, str(script), str(tmp_path / "cache")], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    ]
    assert printed == ["[6.0, 12.0, 15.0, 18.0] 2 0\n", "[6.0, 12.0, 15.0, 18.0] 0 2\n"]


# ---- for which numbers code decides otherwise


def decide(*tests, kind=int):
    """A program with one number, n, and a decision for each of the tests: (operations on n, whether it holds)."""
    program = HostProgram((kind,))
    for operations, holds in tests:
        node = 0
        for operation, *operands in operations:
            node = program.operation(operation, node, *map(program.constant, operands))
        program.guard(node, "is", holds)
    return program


@pytest.mark.parametrize(
    ("tests", "number", "way", "expected"),
    [
        ([([("<", 1000)], True)], 3, 0, [1000]),
        ([([("<", 1000)], False)], 1003, 0, [999]),
        ([([("<", 1000)], False)], 1003, 1, []),
        ([([("%", 10), ("==", 0)], False)], 3, 0, [10]),
        ([([("==", 5000)], False)], 3, 1, [5000]),
        ([([("neg",), ("<=", -77777)], False)], 3, 1, [77777]),
        ([([("**", 20), (">=", 7**20)], False)], 3, 1, [7]),
        ([([("**", 99), ("**", 99), ("**", 99), ("==", 0)], False)], 3, 1, []),
        ([([("math.factorial",), (">", 720)], False)], 3, 1, [7]),
        ([([("math.comb", 3), (">", 1000)], False)], 3, 1, [20]),
        ([([(">", 0)], True)], 3, -1, [0]),
        ([([("<", 4)], True), ([("<", 9)], True)], 3, 0, [4, 9]),
        ([([("<", 4)], True), ([(">=", 4)], False)], 3, 0, [4]),
        ([([("%", 0)], True)], 3, 0, []),  # raises for every n
        ([], 3, 0, []),
    ],
)
def test_the_nearest_number_for_which_a_decision_comes_out_otherwise(tests, number, way, expected):
    assert [n for (n,) in other_answers(decide(*tests), [number], [way])] == expected


def test_floats_turn_at_the_constants_that_they_are_compared_with():
    program = decide(([(">", 0.25)], True), kind=float)
    assert other_answers(program, [1.0], [0]) == [(0.25,)]
    assert other_answers(decide(([(">=", 0.25)], True), kind=float), [1.0], [0]) == [(0.24999999999999997,)]


def test_numbers_beside_stay_as_they_are():
    program = HostProgram((int, int))
    total = program.operation("+", 0, 1)
    program.guard(program.operation("<", total, program.constant(10)), "is", True)
    assert other_answers(program, [2, 3], [0, 0]) == [(7, 3), (2, 8)]
