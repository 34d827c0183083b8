# SPDX-License-Identifier: Apache-2.0
"""Which functions a compiled function cannot repeat, and what to write in place of a call of one."""

from __future__ import annotations

import functools
import os
import sys
import types
from typing import Any, NamedTuple

from graftax._base.missing import MISSING
from graftax._capture.bytecode import instructions_of


class Kind(NamedTuple):
    """What the warning says of calls of one kind."""

    later_calls: str  # what later calls of the compiled function do instead
    remedy: str  # what to write instead
    is_once: bool = False  # does a second call do more than the first one alone has done?


_CALLBACK = "jax.experimental.io_callback calls a function on every run."
_VALUE = "reuse the value from tracing"
_CLOCK = Kind(_VALUE, f"Take the time outside, around jax.block_until_ready, or pass it as an argument. {_CALLBACK}")
_RANDOM = Kind(_VALUE, "Pass a jax.random key to the function, and draw from it.")
_VALUES = Kind(_VALUE, f"Create the value outside and pass it as an argument. {_CALLBACK}")
VALUES_ALONE = (_CLOCK, _VALUES)  # of what changes nothing
_PRINT = Kind("print nothing", "jax.debug.print prints on every run, and shows values instead of tracers.")
_FILE = Kind("leave the file alone", f"Read it outside and pass its content as an argument. {_CALLBACK}")
_APPEND = _FILE._replace(is_once=True)
_INPUT = Kind("do not ask again", f"Ask for it outside and pass the answer as an argument. {_CALLBACK}", True)
_PROCESS = Kind("start nothing", f"Run it outside and pass its result as an argument. {_CALLBACK}", True)
_FILES = Kind("do not look again", f"Look it up outside and pass what the function needs as an argument. {_CALLBACK}")
_NAMES = Kind(
    "see the names from tracing",
    "Name the variables that the function reads, or keep them in a dict: changes to those are noticed.",
)
_SETTING = Kind("do not look again", "Read it outside and pass the value as an argument.")
_THREADS = Kind(
    "start nothing, and do not notice changes to what other threads read",
    "Start it outside, or call the function directly.",
)
_THREAD = Kind(_VALUE, "Ask for it outside and pass the answer as an argument.")
_SIGNAL = Kind("do not do it again", "Read or set it outside and pass what the function needs as an argument.")
_CHANGED = Kind("do not do it again", f"Do it outside of the function. {_CALLBACK}")
_CACHE = Kind(
    "leave the cache alone, and do not ask it again",
    "Do it outside, and pass what the function needs as an argument.",
)
CACHE_OF_INSTANCE = Kind(
    "compute nothing, and neither find a result in the cache nor put one there",
    "The cache goes by the object, which is a copy while the function is traced. Use functools.cached_property, or "
    "pass the result to the function as an argument.",
)
_WARN = Kind("warn of nothing", "jax.debug.callback and jax.experimental.io_callback call a function on every run.")
_HANDED = Kind(
    "leave the object alone",
    "The object is implemented in C and belongs to an object of a registered class: it is compared by identity, so a "
    "change inside it goes unnoticed. Change it outside, and pass a new object in its place.",
)
_LOG = Kind("log nothing", "jax.debug.callback and jax.experimental.io_callback call a function on every run.")

# These fail when they are called a second time, unless with one of these arguments.
_ONCE = ("mkdir", "makedirs", "rmdir", "remove", "unlink", "rename", "replace")
_REPEATED = frozenset(("exist_ok", "missing_ok"))

_CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
_LOGS = ("debug", "info", "warning", "error", "exception", "critical", "log", "warn")
NOW = ("now", "today", "utcnow")

# module -> (kind, names of its functions), ...; without names, all public functions of the module
_FUNCTIONS: dict[str, tuple[tuple[Kind, tuple[str, ...]], ...]] = {
    "time": ((_CLOCK, (*_CLOCKS, *(f"{name}_ns" for name in _CLOCKS), "sleep", "clock_gettime", "strftime")),),
    "random": ((_RANDOM, ()),),
    "numpy.random": ((_RANDOM, ()),),
    "uuid": ((_VALUES, ("uuid1", "uuid4", "uuid6", "uuid7")),),
    "secrets": ((_VALUES, ("token_bytes", "token_hex", "token_urlsafe", "choice", "randbelow", "randbits")),),
    "os": (
        (_VALUES, ("urandom", "getcwd", "getcwdb", "getpid", "getloadavg")),
        (_FILES, ("listdir", "scandir", "stat", "walk", *_ONCE)),
        (_PROCESS, ("system", "popen", "posix_spawn", "kill")),
        (_CHANGED, ("write", "putenv", "unsetenv", "chdir", "umask")),
    ),
    "subprocess": ((_PROCESS, ("run", "call", "check_call", "check_output", "getoutput", "getstatusoutput")),),
    "shutil": ((_FILES, ("copy", "copy2", "copyfile", "copytree", "move", "rmtree", "which", "disk_usage")),),
    **dict.fromkeys(
        ("posixpath", "ntpath"),
        ((_FILES, ("exists", "lexists", "isfile", "isdir", "getsize", "getmtime", "expanduser")),),
    ),
    "sys": (
        (_VALUES, ("getrecursionlimit", "getrefcount", "getswitchinterval")),
        (_CHANGED, ("setrecursionlimit", "setswitchinterval")),
    ),
    "atexit": ((_CHANGED, ("register", "unregister")),),
    "gc": ((_CHANGED, ("enable", "disable", "freeze", "set_threshold")),),
    "signal": ((_CHANGED, ("signal", "alarm", "setitimer", "raise_signal")),),
    "locale": ((_CHANGED, ("setlocale",)),),
    "builtins": ((_PRINT, ("print",)), (_INPUT, ("input",)), (_NAMES, ("globals",))),
    "io": ((_FILE, ("open",)),),
    "numpy": (
        (_FILE, ("load", "save", "savez", "savez_compressed", "loadtxt", "savetxt", "genfromtxt", "fromfile")),
        (_CHANGED, ("set_printoptions", "seterr", "seterrcall", "setbufsize")),
    ),
    "decimal": ((_SETTING, ("getcontext", "setcontext", "localcontext")),),
    "asyncio.threads": ((_THREADS, ("to_thread",)),),
    "_thread": ((_THREADS, ("start_new_thread",)),),
    "threading": ((_THREAD, ("current_thread", "get_ident", "get_native_id", "active_count", "enumerate")),),
    "warnings": ((_WARN, ("warn", "warn_explicit")),),
    "logging": ((_LOG, _LOGS),),
}
# What messages have before the name of a function, where that is not its module.
_PREFIXES = {"posixpath": "os.path.", "ntpath": "os.path.", "asyncio.threads": "asyncio.", "builtins": "", "io": ""}
# These are impure if they are called without arguments.
_UNSEEDED = {
    "time": (_CLOCK, ("localtime", "gmtime", "ctime", "asctime")),
    "random": (_RANDOM, ("Random",)),
    "numpy.random": (_RANDOM, ("default_rng", "RandomState", "SeedSequence")),
}
# (module, class, kind, names of its methods)
_Methods = tuple[str, str, Kind, tuple[str, ...]]
_POOL = ("apply", "apply_async", "map", "map_async", "starmap", "starmap_async", "imap", "imap_unordered")
_PATH = (
    *("read_text", "read_bytes", "write_text", "write_bytes", "open", "exists", "is_file", "is_dir", "iterdir"),
    *("glob", "rglob", "touch", "stat", "cwd", "home", *_ONCE),
)
_METHODS: tuple[_Methods, ...] = (
    ("logging", "Logger", _LOG, _LOGS),
    ("logging", "Logger", _CHANGED, ("setLevel", "addHandler", "removeHandler")),
    ("logging", "Handler", _CHANGED, ("setLevel", "setFormatter")),
    ("logging", "Filterer", _CHANGED, ("addFilter", "removeFilter")),
    ("threading", "Thread", _THREADS, ("start",)),
    ("threading", "Event", _SIGNAL, ("is_set", "set", "clear", "wait")),
    ("concurrent.futures._base", "Future", _SIGNAL, ("done", "running", "cancel", "result", "exception")),
    ("concurrent.futures.thread", "ThreadPoolExecutor", _THREADS, ("submit", "map")),
    ("concurrent.futures.process", "ProcessPoolExecutor", _THREADS, ("submit", "map")),
    ("multiprocessing.pool", "Pool", _THREADS, _POOL),
    ("asyncio.base_events", "BaseEventLoop", _THREADS, ("run_in_executor",)),
    ("functools", "_lru_cache_wrapper", _CACHE, ("cache_clear", "cache_info")),
    ("pathlib", "Path", _FILE, _PATH),
)
# Attributes of modules that tell of the process, and are read without a call.
_ATTRIBUTES = {
    ("sys", "modules"): Kind(_VALUES.later_calls, "Import the module by its name: a change to it is noticed."),
    ("sys", "argv"): _SETTING,
    ("sys", "path"): _SETTING,
}


class Call(NamedTuple):
    """A function that cannot be replayed, or an attribute of a module that is read without a call."""

    name: str
    kind: Kind
    unseeded: bool = False  # only if it is called without arguments
    is_read: bool = False  # is it an attribute?

    def of_code(self, code: types.CodeType) -> Call:
        """The call as this code makes it: what opens a file may append to it, and a folder is made once."""
        if self.kind in (_FILE, _FILES) and self.name.rpartition(".")[2] in _ONCE:
            keywords = {text for const in code.co_consts if type(const) is tuple for text in const}
            return self if keywords & _REPEATED else self._replace(kind=self.kind._replace(is_once=True))
        is_open = self.kind is _FILE and self.name.endswith("open") and not _APPENDS.isdisjoint(code.co_consts)
        return self._replace(kind=_APPEND) if is_open and _appends(code) else self


def _appends(code: types.CodeType) -> bool:
    """Is a mode that appends among the arguments of a call of `open`?"""
    is_open = False
    for instruction in instructions_of(code):
        if instruction.argval == "open":
            is_open = True
        elif instruction.opname.startswith("CALL"):
            is_open = False
        elif is_open and instruction.opname == "LOAD_CONST" and instruction.argval in _APPENDS:
            return True
    return False


_APPENDS = frozenset(("a", "ab", "at", "a+", "ab+", "a+b", "at+", "a+t"))
ENVIRON = Call("os.environ", _SETTING, is_read=True)
VARS_OF_MODULE = Call("vars", _NAMES)


class Table(NamedTuple):
    """All such functions of the modules that are imported."""

    calls: dict[Any, Call]  # by functions of modules
    methods: dict[Any, Call]  # by functions that classes have
    types: frozenset[type]  # the types of all these: what is of no such type is not hashed to look it up
    states: dict[int, str]  # by id, the generators behind the functions of `random` and `numpy.random`
    codes: dict[int, Call]  # by id, the code of methods in Python and of `os.environ`, heard as it runs
    names: frozenset[str]  # the last names of all these functions
    classes: tuple[type, ...]  # those with such methods
    method_names: frozenset[str]


@functools.cache
def _table(modules: tuple[str, ...], method_rows: tuple[_Methods, ...]) -> Table:
    # Functions of modules, by the names that messages have for them.
    calls: dict[Any, Call] = {}
    states: dict[int, str] = {}
    for module in modules:
        names = vars(sys.modules[module])
        # The functions of these modules are methods of one hidden generator.
        if module in ("random", "numpy.random"):
            states[id(names["random"].__self__)] = module
        shown = _PREFIXES.get(module, f"{module}.")
        unseeded = _UNSEEDED.get(module, (_RANDOM, ()))[1]
        for kind, name in [(kind, name) for kind, chosen in _FUNCTIONS[module] for name in chosen or names["__all__"]]:
            value = names.get(name)
            # Making a generator draws nothing, unless it has no seed.
            if callable(value) and not isinstance(value, type) and name not in unseeded:
                calls[value] = Call(f"{shown}{name}", kind)
        calls.update((names[name], Call(f"{module}.{name}", _UNSEEDED[module][0], True)) for name in unseeded)
    # Methods. A class method is noted by its function, which `call_of` finds in the bound method.
    methods: dict[Any, Call] = {}
    for module, name, kind, chosen in method_rows:
        cls = getattr(sys.modules[module], name)
        functions = [(method, getattr(cls, method, None)) for method in chosen]
        shown = "" if name == "_lru_cache_wrapper" else f"{name}."
        methods.update((getattr(f, "__func__", f), Call(f"{shown}{method}", kind)) for method, f in functions if f)
    codes = {id(f.__code__): call for f, call in methods.items() if isinstance(f, types.FunctionType)}
    codes.update((id(code), ENVIRON) for code in ENVIRON_CODES)
    last_names = {call.name.rpartition(".")[2] for call in (*calls.values(), *methods.values())}
    return Table(
        calls,
        methods,
        frozenset(map(type, (*calls, *methods))) | {type(f.__func__) for f in calls if isinstance(f, types.MethodType)},
        states,
        codes,
        frozenset(last_names | {*NOW, "environ", "getenv"}),
        tuple(getattr(sys.modules[module], name) for module, name, *_ in method_rows),
        frozenset(method for *_, chosen in method_rows for method in chosen),
    )


def known_functions() -> Table:
    """The table for the modules that are imported by now: nobody calls functions of the others."""
    return _table_for_count(len(sys.modules))


@functools.lru_cache(1)
def _table_for_count(count: int) -> Table:
    """The table is looked up again when there are more modules than the last time."""
    # Classes of modules that are imported later join the table then, so nothing is imported for it.
    method_rows = tuple(row for row in _METHODS if hasattr(sys.modules.get(row[0]), row[1]))
    return _table(tuple(name for name in _FUNCTIONS if name in sys.modules), method_rows)


def is_impure_module(module: types.ModuleType) -> bool:
    """Does this module have such functions?"""
    return module.__name__ in _FUNCTIONS or module.__name__ == "datetime"


def read_of(module: Any, attribute: str) -> Call | None:
    """The entry for an attribute of a module that is impure to read; None for any other."""
    kind = (
        _ATTRIBUTES.get((getattr(module, "__name__", ""), attribute)) if isinstance(module, types.ModuleType) else None
    )
    return None if kind is None else Call(f"{module.__name__}.{attribute}", kind, is_read=True)


ENVIRON_CODES: tuple[types.CodeType, ...] = tuple(
    vars(type(os.environ))[name].__code__ for name in ("__getitem__", "__setitem__", "__delitem__", "__iter__")
)
ENVIRON_FILES = ("<frozen os>", os.__file__, "<frozen _collections_abc>")  # of frames between it and the code that asks


def call_of(function: Any, first: Any = MISSING) -> Call | None:
    """The entry for a function that cannot be replayed; None for any other.

    Args:
        first: the first argument of the call. For a method in C that is the object.
    """
    table = known_functions()
    if type(function) is types.MethodType:
        if type(function.__func__) not in table.types:
            return None
        if (method := table.methods.get(function.__func__)) is not None:
            return method
    if type(function) is types.BuiltinMethodType and function.__name__ in NOW:
        return Call(f"datetime.{function.__name__}", _VALUES) if is_date(function.__self__) else None
    if is_console(first) and getattr(function, "__name__", "") in ("write", "writelines"):
        return Call(f"sys.stdout.{function.__name__}", _PRINT)
    call = table.calls.get(function) or table.methods.get(function) if type(function) in table.types else None
    # A method of the generator behind `random.random()` that is no function of the module.
    if call is None and id(first) in table.states and hasattr(function, "__name__"):
        return Call(f"{table.states[id(first)]}.{function.__name__}", _RANDOM)
    return call


def is_console(value: object) -> bool:
    """Is it where `print` writes to?"""
    return value is sys.stdout or value is sys.stderr


def handing_over(function: object) -> Call | None:
    """The entry for a function in C that gets an object of C code, whose change inside nobody would notice."""
    # Builtins only look at what they get.
    if isinstance(function, (types.FunctionType, type)) or getattr(function, "__module__", "") == "builtins":
        return None
    if isinstance(function, types.MethodType) and isinstance(function.__func__, types.FunctionType):
        return None
    return Call(str(getattr(function, "__qualname__", type(function).__name__)), _HANDED)


def is_date(value: object) -> bool:
    """Is it `datetime.date`, or a class based on it?"""
    module = sys.modules.get("datetime")
    return module is not None and type(value) is type and issubclass(value, module.date)
