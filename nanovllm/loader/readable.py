"""One kind of error for damaged files, whichever library reads them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Whatever a parser raises on a damaged file becomes a ValueError that names the file and the fault."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{path}: could not be read: {type(error).__name__}: {error}") from error
