"""Loops over numbers and arrays that numba compiles.

Machine code is kept on disk, next to the loop's module or in the user's cache, for later processes. Results are those
of Python to the bit: sums keep their order. A loop does not hold Python's global lock.
"""

import contextlib
import functools
import hashlib
import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar, get_type_hints

_IMPORTED = re.compile(rb"^from megatron_balance\.([\w.]+) import", re.MULTILINE)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Compiled(Generic[Arguments, Result]):
    """A function that is compiled by `prepare`, or when it is called for the first time."""

    def __init__(self, signature: str | None, tuples: tuple[type, ...], function: Callable[Arguments, Result]) -> None:
        functools.update_wrapper(self, function)
        self._signature = signature
        self._tuples = tuples
        self._function = function

    def prepare(self) -> None:
        """Compile the function, or read its code from disk, so that no later call takes seconds for it."""
        _ = self._code

    @cached_property
    def _code(self) -> Callable[Arguments, Result]:
        # Importing numba takes a quarter of a second, and most commands need no loop
        import numba

        code: Any = numba.njit(nogil=True)(self._function)
        # numba raises this error where it can write to no directory; the code is then not kept
        with contextlib.suppress(RuntimeError):
            code.enable_caching()
            # By itself, numba compiles again only if the loop's own file has changed, but the code contains other loops
            code._cache._cache_file._source_stamp = _digest()
        if self._signature is not None:
            named = {kind.__name__: _type_of(kind) for kind in self._tuples}
            code.compile(eval(self._signature, {**vars(numba.types), **named}))
            code.disable_compile()
        return code

    @property
    def _numba_type_(self) -> object:
        """The type for other compiled functions, which may call this one."""
        import numba

        return numba.typeof(self._code)

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return self._code(*args, **kwargs)


def _type_of(kind: Any) -> Any:
    """Return numba's type for an annotation: a number, a NamedTuple, or `Annotated[np.ndarray, "int64[::1]"]`."""
    import numba

    if hasattr(kind, "_fields"):
        hints = get_type_hints(kind, include_extras=True)
        return numba.types.BaseTuple.from_types([_type_of(hints[name]) for name in kind._fields], kind)
    numbers = {int: numba.types.int64, float: numba.types.float64, bool: numba.types.boolean}
    return numbers[kind] if kind in numbers else eval(kind.__metadata__[0], vars(numba.types).copy())


@functools.cache
def _digest() -> str:
    """Return a digest of the files of this package that have loops, and of those that these import from.

    Kept code contains the loops that a loop calls, and the values of constants.
    """
    root = Path(__file__).parents[1]
    texts = [text for path in sorted(root.rglob("*.py")) if b"@compiled(" in (text := path.read_bytes())]
    names = sorted({name for text in texts for name in _IMPORTED.findall(text)})
    files = (root.joinpath(*name.decode().split(".")).with_suffix(".py") for name in names)
    texts += [file.read_bytes() for file in files if file.is_file()]
    return hashlib.sha256(b"".join(texts)).hexdigest()


def compiled(
    signature: str | None, *tuples: type
) -> Callable[[Callable[Arguments, Result]], Compiled[Arguments, Result]]:
    """Return a decorator for functions whose arguments have numba's types of `signature`, such as `int64(int64[:])`.

    Args:
        signature: None for functions that other compiled functions call; their arguments have any types.
        tuples: NamedTuples that the signature names. The annotation of a field is a type of a number, another
            NamedTuple, or `Annotated[np.ndarray, "float64[:,::1]"]` with the array's type.
    """

    def compile_later(function: Callable[Arguments, Result]) -> Compiled[Arguments, Result]:
        return Compiled(signature, tuples, function)

    return compile_later
