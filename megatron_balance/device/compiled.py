"""Loops over numbers and arrays, compiled by numba.

Machine code is cached on disk. Results equal Python's to the bit, except that dividing by zero raises no error. Loops
release Python's global lock.
"""

import contextlib
import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np

_IMPORTED = re.compile(rb"^from megatron_balance\.([\w.]+) import", re.MULTILINE)


class Compiled:
    """A function that is compiled by `prepare`, or at its first call."""

    def __init__(
        self, signature: str | None, tuples: tuple[type, ...], function: Callable[..., Any], *, inline: bool
    ) -> None:
        functools.update_wrapper(self, function)
        self._signature = signature
        self._tuples = tuples
        self._function = function
        self._inline = inline

    def prepare(self) -> None:
        """Compile the function, or load its code from disk, so no later call waits for numba."""
        _ = self._code

    @cached_property
    def _code(self) -> Callable[..., Any]:
        # Importing numba takes a quarter of a second, and most commands need no loop
        import numba

        # Python does not call functions without a signature, so it needs no wrappers for them
        wrappers: Any = dict.fromkeys(("no_cpython_wrapper", "no_cfunc_wrapper"), self._signature is None)
        code: Any = numba.njit(nogil=True, error_model="numpy", forceinline=self._inline, **wrappers)(self._function)
        # numba raises this error if no cache directory is writable; the code is then not cached
        with contextlib.suppress(RuntimeError):
            code.enable_caching()
            # numba alone would recompile only if the loop's own file changed, but the code contains other loops
            file = code._cache._cache_file
            file._source_stamp = _digest()
            try:
                file._load_index()
            except (AttributeError, ImportError):
                # The index names types that this version of the code does not have
                file.flush()
        if self._signature is not None:
            named = {kind.__name__: _type_of(kind) for kind in self._tuples}
            with _optimizing(self._function.__qualname__):
                code.compile(eval(self._signature, {**vars(numba.types), **named}))
            code.disable_compile()
        return code

    @property
    def _numba_type_(self) -> object:
        """The function's type, for compiled functions that call it."""
        import numba

        return numba.typeof(self._code)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._function if self._signature is None else self._code)(*args, **kwargs)


@contextlib.contextmanager
def _optimizing(name: str) -> Iterator[None]:
    """Let numba optimize only the function of this name, which contains the code of all functions that it calls.

    Otherwise, numba would also optimize each of these on its own, which takes as long as all the rest of a compilation.
    """
    from llvmlite.binding import Linkage
    from numba.core.codegen import CPUCodeLibrary
    from numba.core.compiler_lock import global_compiler_lock

    # Functions that other threads compile meanwhile would not be optimized without the lock
    with global_compiler_lock:
        before = CPUCodeLibrary._optimize_final_module
        # Compiling a function may compile another one that has a signature
        optimize = inspect.unwrap(before)

        @functools.wraps(optimize)
        def optimize_named(self: CPUCodeLibrary) -> None:
            if self.name == name:
                for function in self._final_module.functions:
                    # Otherwise, this process would call other functions' own code, which has the same names
                    if function.linkage is Linkage.linkonce_odr:
                        function.linkage = Linkage.internal
                optimize(self)

        CPUCodeLibrary._optimize_final_module = optimize_named
        try:
            yield
        finally:
            CPUCodeLibrary._optimize_final_module = before


def packed(numbers: Any) -> np.ndarray:
    """Return an array of one record: the fields of a NamedTuple of numbers, maybe nested, for compiled functions. numba
    takes a record a few microseconds faster than a NamedTuple."""
    return np.array([numbers], _record(type(numbers)))


@functools.cache
def _record(kind: Any) -> np.dtype:
    kinds = get_type_hints(kind).items()
    return np.dtype([(name, _record(field) if hasattr(field, "_fields") else np.dtype(field)) for name, field in kinds])


def _has_arrays(kind: Any) -> bool:
    hints = get_type_hints(kind, include_extras=True).values()
    return any(_has_arrays(hint) if hasattr(hint, "_fields") else hasattr(hint, "__metadata__") for hint in hints)


def _type_of(kind: Any) -> Any:
    """Return numba's type of an annotation; see `compiled`."""
    import numba

    if hasattr(kind, "_fields"):
        if not _has_arrays(kind):
            return numba.from_dtype(_record(kind))
        hints = get_type_hints(kind, include_extras=True)
        return numba.types.BaseTuple.from_types([_type_of(hints[name]) for name in kind._fields], kind)
    numbers = {int: numba.types.int64, float: numba.types.float64, bool: numba.types.boolean}
    return numbers[kind] if kind in numbers else eval(kind.__metadata__[0], vars(numba.types).copy())


@functools.cache
def _digest() -> str:
    """Return a digest of all compiled code: of the files with loops, and the files that these import from."""
    root = Path(__file__).parents[1]
    texts = [text for path in sorted(root.rglob("*.py")) if b"@compiled(" in (text := path.read_bytes())]
    names = sorted({name for text in texts for name in _IMPORTED.findall(text)})
    files = (root.joinpath(*name.decode().split(".")).with_suffix(".py") for name in names)
    texts += [file.read_bytes() for file in files if file.is_file()]
    return hashlib.sha256(b"".join(texts)).hexdigest()


def compiled(signature: str | None, *tuples: type, inline: bool = False) -> Callable[[Callable[..., Any]], Compiled]:
    """Return a decorator that compiles functions of this signature in numba's types, such as `int64(int64[:])`.

    Args:
        signature: None for functions that other compiled functions call. Their arguments have any types, and Python
            calls the function as it is.
        tuples: NamedTuples named in the signature. A NamedTuple of numbers is a record as made by `packed`. In a
            NamedTuple with arrays, a field's annotation is a number's type, another NamedTuple, or
            `Annotated[np.ndarray, "float64[:,::1]"]` with the array's type.
        inline: whether the function's code is copied into its callers. Use it for short functions in inner loops,
            because a call updates the reference count of each array that it passes.
    """
    return functools.partial(Compiled, signature, tuples, inline=inline)
