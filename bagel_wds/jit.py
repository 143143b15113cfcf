"""Loops over pixels, compiled by Numba for the processor at hand, and kept on the disk for later processes.

Numba's own cache will not do. Its processes race for a list of files, and can end with the code of one for the name of another; a
file that was cut stops the program. Here each function has a file, under a name made of all that its code depends on, with
a checksum; a file that is missing or broken is made again, and where none can be written, each process compiles for itself.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import llvmlite  # type: ignore[import-untyped]
import numba
import numpy as np
import xxhash
from numba import njit
from numba.core import serialize
from numba.core.compiler import CompileResult
from numba.core.registry import cpu_target

from bagel_wds.user_folder import cache_folder

if TYPE_CHECKING:
    from collections.abc import Callable

    F = TypeVar("F", bound=Callable[..., object])

_DIGEST_BYTES = 16


def compiled(function: F) -> F:
    """A function of arrays and numbers, compiled when it is first called; it runs without Python's lock."""
    # Flags are part of this file, whose content is part of a kept file's name.
    fast: Any = njit(nogil=True, error_model="numpy")(function)
    # What Numba's own cache offers is offered here; there is no public way to put another in its place.
    fast._cache = _Kept(function)  # noqa: SLF001
    same: F = fast
    return same


def load_all() -> None:
    """Load what Numba loads with the first function that it is to have ready: half of its modules."""
    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()


class _Kept:
    """Where the code of a function is kept, of each signature a file; what Numba asks of a cache."""

    cache_path = ""

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    def load_overload(self, signature: object, target: Any) -> Any:
        """What was compiled for a signature, ready to run; None if that is not there, or not whole."""
        target.refresh()
        try:
            path = self._path(signature, target.codegen())
            digest, content = _split(path.read_bytes())
            if digest != _digest(path, content):
                return None
            rebuild: Any = CompileResult._rebuild  # noqa: SLF001 - as Numba's own cache
            return rebuild(target, *pickle.loads(content))  # noqa: S301 - our own file
        except Exception:  # noqa: BLE001 - whatever there is, it can be compiled again
            return None

    def save_overload(self, signature: object, result: Any) -> None:
        """Keep what was compiled, as far as the disk lets us."""
        # Whatever is in the way: it is compiled, and that is enough for this process.
        with suppress(Exception):
            path = self._path(signature, result.codegen)
            path.parent.mkdir(parents=True, exist_ok=True)
            dumps: Any = serialize.dumps
            content: bytes = dumps(result._reduce())  # noqa: SLF001 - as Numba's own cache
            # Whole or not at all: others may read it at this moment.
            number, name = tempfile.mkstemp(dir=path.parent, prefix=".part-")
            try:
                with os.fdopen(number, "wb") as file:
                    file.write(_digest(path, content) + content)
                Path(name).replace(path)
            except OSError:
                Path(name).unlink(missing_ok=True)
                raise

    def flush(self) -> None:
        """Nothing is to be forgotten: a file's name says all that it depends on."""

    def _path(self, signature: object, codegen: Any) -> Path:
        function = self._function
        parts = (
            signature,
            codegen.magic_tuple(),
            [cell.cell_contents for cell in function.__closure__ or ()],
            _source_of(sys.modules[function.__module__].__file__ or ""),
            _source_of(__file__),
            sorted(item for item in os.environ.items() if item[0].startswith("NUMBA_")),
            (numba.__version__, llvmlite.__version__, np.__version__, sys.version),
        )
        name = f"{function.__module__}.{function.__name__}-{xxhash.xxh3_128_hexdigest(repr(parts).encode())}"
        return _folder() / name


def _split(kept: bytes) -> tuple[bytes, bytes]:
    return kept[:_DIGEST_BYTES], kept[_DIGEST_BYTES:]


def _digest(path: Path, content: bytes) -> bytes:
    return xxhash.xxh3_128_digest(path.name.encode() + content)


@cache
def _source_of(path: str) -> str:
    return xxhash.xxh3_128_hexdigest(Path(path).read_bytes())


def _folder() -> Path:
    own = os.environ.get("NUMBA_CACHE_DIR")
    return (Path(own) if own else cache_folder()) / "bagel-wds" / "compiled"
