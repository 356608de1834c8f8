"""What a program may use that shares the process of its tests: modules, their names, attributes, bases, methods.

All of it is lists of what is allowed, but for a few names that never are. Runs inside the sandbox; needs the standard
library only.
"""

import array
import ast
import builtins
import collections
import datetime
import decimal
import fractions
import importlib
import ipaddress
import pathlib
import re
import sys
import types
import unittest
import uuid
from functools import lru_cache

from gtpo_megatron.sandbox.inside.special_methods import ARITHMETIC, CONVERSIONS, OPERATORS, ORDER, dunders


def _words(text):
    return frozenset(text.split())


class NotAllowed(Exception):  # noqa: N818 - a reason, not a failure
    """What a program does that must have a process of its own."""


WHOLE = (
    "math", "cmath", "itertools", "heapq", "bisect", "string", "re", "random", "statistics", "copy", "datetime", "time",
    "calendar", "fractions", "numbers", "abc", "collections", "collections.abc", "enum", "json", "textwrap", "array",
    "queue", "secrets", "hashlib", "base64", "binascii", "struct", "uuid", "difflib", "pprint", "unicodedata", "html",
    "html.parser", "urllib.parse", "colorsys", "contextlib", "functools", "operator", "decimal", "dataclasses",
    "typing", "io", "pathlib", "csv", "os.path", "zlib", "ipaddress", "graphlib", "hmac", "numpy.linalg", "numpy.fft",
    "numpy.random", "numpy", "sortedcontainers", "concurrent.futures", "shlex", "fnmatch", "glob", "tempfile",
    "__future__",
)  # fmt: skip
"""Modules of which every public name may be used, but for those in ``NOT_OF``; their modules only if listed here."""

NAMES_OF = {
    "sys": "maxsize stdin stdout stderr setrecursionlimit getrecursionlimit version_info version float_info int_info "
    "byteorder getsizeof argv platform maxunicode set_int_max_str_digits intern exit",
    "os": "path getcwd listdir makedirs mkdir remove unlink rename replace rmdir getenv environ sep linesep stat walk "
    "scandir urandom cpu_count getpid PathLike fspath",
    "types": "SimpleNamespace MappingProxyType GeneratorType",
    "warnings": "warn simplefilter filterwarnings catch_warnings",
    "logging": "basicConfig getLogger Logger Handler StreamHandler FileHandler NullHandler LogRecord DEBUG INFO "
    "WARNING WARN ERROR CRITICAL NOTSET debug info warning error critical exception log getLevelName",
    "threading": "Thread Lock RLock Condition Semaphore BoundedSemaphore Event Barrier Timer local current_thread "
    "active_count get_ident",
    "asyncio": "run sleep gather wait wait_for create_task ensure_future Queue PriorityQueue LifoQueue QueueEmpty "
    "QueueFull Lock Event Condition Semaphore BoundedSemaphore TimeoutError CancelledError as_completed shield "
    "iscoroutinefunction iscoroutine get_event_loop new_event_loop get_running_loop timeout TaskGroup "
    "to_thread FIRST_COMPLETED FIRST_EXCEPTION ALL_COMPLETED",
    "argparse": "ArgumentParser Namespace ArgumentTypeError ArgumentError SUPPRESS REMAINDER OPTIONAL ZERO_OR_MORE "
    "ONE_OR_MORE RawDescriptionHelpFormatter ArgumentDefaultsHelpFormatter RawTextHelpFormatter BooleanOptionalAction",
    "concurrent": "",
    "urllib": "",
    "shutil": "copy copy2 copyfile copytree move rmtree get_terminal_size",
    "sqlite3": "connect Row Error IntegrityError OperationalError DatabaseError ProgrammingError Connection Cursor "
    "PARSE_DECLTYPES PARSE_COLNAMES Binary",
    "configparser": "ConfigParser RawConfigParser NoSectionError NoOptionError Error",
    "weakref": "ref WeakValueDictionary WeakKeyDictionary WeakSet",
    "zoneinfo": "ZoneInfo",
    "locale": "",
}
"""Modules of which these names may be used."""

NOT_OF = {
    "functools": "update_wrapper WRAPPER_ASSIGNMENTS WRAPPER_UPDATES",
    "string": "Formatter",
    "typing": "get_type_hints ForwardRef no_type_check_decorator get_origin get_args",
    "random": "setstate",
    "numpy.random": "set_state",
    "enum": "global_enum global_enum_repr global_flag_repr global_str EnumMeta EnumType EnumDict",
    "decimal": "getcontext setcontext localcontext DefaultContext BasicContext ExtendedContext Context",
    "dataclasses": "make_dataclass",
    "re": "Scanner",
    "abc": "update_abstractmethods",
    "io": "open_code",
    "numpy": "load save savez savez_compressed loadtxt savetxt genfromtxt fromfile memmap nditer nested_iters seterr "
    "seterrcall setbufsize set_printoptions printoptions info show_config show_runtime frompyfunc get_include busday "
    "broadcast getbufsize recarray record rec char ma testing lib core ctypeslib",
}
"""Names that may not be used: what they do with a name or an object is not to be seen in the program's text."""

CALLED_ONLY = ("wraps", "attrgetter", "methodcaller", "namedtuple", "SimpleNamespace")
"""Names of modules that are allowed in one form only (see ``check.py``)."""

METACLASSES = ("ABCMeta", "EnumMeta", "EnumType")
TUPLES = ("namedtuple", "NamedTuple")
KEEPING = ("dataclass", "total_ordering", "final", "unique")
"""Decorators of a class that leave its name its own."""
SET_LIKE = ("Set", "MutableSet", "KeysView", "ItemsView", "MappingView", "ValuesView")
"""Classes whose ``==`` asks for the size and for the elements, each of which may lie."""
USER = ("UserDict", "UserList", "UserString")
WITH_ERRORS = ("json", "queue", "asyncio", "sqlite3", "configparser")
OF_REGISTRIES = ("collections.abc", "numbers", "abc", "io", "contextlib", "typing", "os")
"""Modules with classes that take others in by ``register``."""
READABLE = ("__name__", "__doc__", "__file__", "__class__")
"""Dunder names that may be read."""
OF_TYPES = (
    ast.Expression, ast.Name, ast.Attribute, ast.Subscript, ast.Tuple, ast.List, ast.BinOp, ast.BitOr, ast.Constant,
    ast.Load,
)  # fmt: skip
"""What an annotation that is a text may be made of."""

ENUMS = ("Enum", "IntEnum", "StrEnum", "Flag", "IntFlag", "ReprEnum")
STARRED = (
    "math", "cmath", "itertools", "heapq", "bisect", "collections", "random", "statistics", "datetime", "fractions",
    "typing", "enum",
)  # fmt: skip
"""Modules of which ``*`` may be imported; what may not be used of them is looked at where it is used."""

NEVER = _words(
    "exec eval compile __import__ globals locals dir breakpoint help KeyboardInterrupt copyright credits license "
    "__builtins__ __loader__ __spec__ __build_class__ __debug__"
)
"""Names of Python's that no such program uses."""

BY_NAME = ("getattr", "hasattr", "setattr", "delattr")
LOOKED_AT = (*BY_NAME, "type", "super", "vars")
"""Names of Python's that may be used in some forms, whatever the program calls so itself."""

_STEPPED = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
INSIDES = frozenset(
    [
        *(
            name
            for kind in (types.FrameType, types.CodeType, types.TracebackType, *_STEPPED)
            for name in dir(kind)
            if name.startswith(("f_", "co_", "tb_", "gi_", "cr_", "ag_"))
        ),
        *("ctypes", "get_stack", "print_stack", "get_coro", "with_traceback", "load_extension"),
        *("enable_load_extension", "format_map", "strides", "getfield", "setfield", "mro", "setstate", "set_state"),
        *("registry", "dispatch", "findCaller"),
    ]
)
"""Attributes that lead to frames, code or memory."""

CHECKS = frozenset(["pytestmark", *(name for name in dir(unittest.TestCase) if name.startswith(("assert", "fail")))])
"""Attributes that a program may not set: it may be given a case of unittest."""


DUNDERS_READ = dunders("name qualname doc init len iter next str repr")
"""Dunder attributes that may be read of anything."""

DEFINED = dunders(
    "init new repr str format bytes bool len iter next reversed getitem setitem delitem missing call enter exit aenter "
    "aexit aiter anext await hash int float complex index round trunc floor ceil abs neg pos invert post_init "
    "init_subclass class_getitem set_name get set delete copy deepcopy getstate setstate sizeof length_hint fspath "
    "getnewargs dir"
)
"""Methods that a class may define as it likes: none of them knows what its result is compared with."""

COMPARISONS = ORDER | {"__eq__", "__ne__"}
BINARY = ARITHMETIC | COMPARISONS | {"__contains__"}
"""Methods that know what they are compared or calculated with; they must have a form that is honest with values."""
INHERITED = DEFINED | BINARY | {"__setattr__", "__delattr__"}
"""Methods that may be called of a base."""

TO_NUMBER = CONVERSIONS | {"__len__"}
SCALING = frozenset(name for name, one in OPERATORS.items() if one in ("mul", "truediv", "floordiv", "matmul", "pow"))

ASSIGNED = dunders("all version author slots hash doc")
"""Dunder names that may be assigned."""

BASES = _words(
    "ABC Generic Protocol NamedTuple TypedDict OrderedDict defaultdict Counter deque UserDict UserList UserString "
    "Thread JSONEncoder JSONDecoder ContextDecorator AbstractContextManager AbstractAsyncContextManager StringIO "
    "Handler HTMLParser Template local List Dict Set Tuple"
) | frozenset(ENUMS)
"""Classes of modules of which a class may be made, besides those of ``collections.abc``, by ``typing``'s names too."""

VALUES: tuple = (
    *(int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, bool, range, slice, type(None)),
    *(type({}.keys()), type({}.values()), type({}.items()), type(lambda: 0), type, BaseException, memoryview),
)
VALUE_BASES = {
    "NamedTuple": tuple, "List": list, "Dict": dict, "Set": set, "Tuple": tuple, "OrderedDict": None,
    "defaultdict": None, "Counter": None, "deque": None, "UserDict": None, "UserList": None, "UserString": None,
}  # fmt: skip
"""Classes of values in modules, by the name that a program has for them; None: of ``collections``."""

OF_ARRAYS = _words(
    "A A1 H I T alignment all any argmax argmin argpartition argsort as_integer_ratio astype base bit_count byteorder "
    "byteswap char choose clip compress conj conjugate copy ctypes cumprod cumsum data denominator descr device "
    "diagonal dot dtype dump dumps fields fill flags flat flatten fromhex getA getA1 getH getI getT getfield "
    "hasobject hex imag is_integer isalignedstruct isbuiltin isnative item itemset itemsize kind mT max mean metadata "
    "min name names nbytes ndim newbyteorder nonzero num numerator partition prod ptp put ravel real repeat reshape "
    "resize round searchsorted setfield setflags shape size sort squeeze std str strides subdtype sum swapaxes take "
    "to_device tobytes tofile tolist tostring trace transpose type var view"
)
"""Attributes of the values of numpy, which is not loaded for them alone."""


@lru_cache(maxsize=1)
def attributes_of_values():
    """Names of attributes that some value has which is no object of a program's class."""
    kinds = [
        *VALUES, decimal.Decimal, fractions.Fraction, datetime.datetime, datetime.timedelta, pathlib.Path, array.array,
        types.SimpleNamespace, types.ModuleType, collections.deque, collections.Counter, collections.OrderedDict,
        collections.defaultdict, uuid.UUID, type(re.compile("")), type(re.match("", "")), StopIteration, OSError,
        ipaddress.IPv4Address, ipaddress.IPv4Network,
    ]  # fmt: skip
    others = _words("name value expected rel abs nan_ok")  # of enumerations' members, and pytest's approx
    return OF_ARRAYS.union(others, *map(dir, kinds))


def is_listed(module):
    """Whether a program may use a module."""
    return module in WHOLE or module in NAMES_OF


@lru_cache(maxsize=256)
def names_of(module):
    """The names of a module that a program may use, or None if the module is not allowed.

    It is loaded, so that what is in it can be frozen before the program comes.
    """
    if not is_listed(module):
        return None
    try:
        loaded = importlib.import_module(module)
    except ImportError:
        return None
    if module in NAMES_OF:
        return frozenset(NAMES_OF[module].split())
    left_out = NOT_OF.get(module, "").split()
    return frozenset(
        name
        for name in (vars(loaded) if module == "__future__" else _public(loaded))
        if name not in left_out and not _is_shared(getattr(loaded, name, None), f"{module}.{name}")
    )


def starred(module):
    """The names that ``from MODULE import *`` binds."""
    return _public(importlib.import_module(module)) if module in STARRED else []


def _public(module):
    return getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]


def _is_shared(value, place):
    """Whether all who use a value share what is in it, and may change it."""
    if isinstance(value, types.ModuleType):
        return not is_listed(place)
    return isinstance(value, dict | list | set | bytearray)


def prepare():
    """Looks into the modules that are loaded already, once for all programs."""
    for module in (*WHOLE, *NAMES_OF):
        if module in sys.modules:
            names_of(module)
    attributes_of_values()


BUILTINS = frozenset(vars(builtins))
