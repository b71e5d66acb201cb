"""Compiles C++ itself. Nothing to stop."""

from concurrent.futures import ThreadPoolExecutor
from ctypes import c_int64, c_void_p
from pathlib import Path

from problems.common import build
from tests.attacks.shared import VARIANT

VERDICT = "PASSED"
SOURCE = Path(__file__).with_suffix(".cpp")
if VARIANT == "pool":
    _pool = ThreadPoolExecutor(4)
    _built = [_pool.submit(build.cpp, SOURCE, ("-O1", f"-DWAY={way}")) for way in range(2)]


def add(data, library):
    function = library.function("add_floats", *[c_void_p] * 3, c_int64)
    x, y = data.x.float(), data.y.float()
    build.check(function(x.data_ptr(), y.data_ptr(), x.data_ptr(), len(x)), "add_floats")
    return data.z.copy_(x)


def pool(data):
    """In a pool of its own while it is imported, and leaves the pool's threads idle. Idle threads are no work."""
    return add(data, _built[0].result())


def lazy(data):
    """In the first call, which is not timed: what it costs stays out of the samples."""
    return add(data, build.cpp(SOURCE))
