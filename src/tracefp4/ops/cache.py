"""Where compiled code is kept between processes: a folder of the user's cache, in it a folder per key, in it files
whose names are the digests of their own contents, so that a damaged file is never used.
"""

import hashlib
import os
import tempfile
from functools import cache
from pathlib import Path


@cache
def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/tracefp4/kernels or ~/.cache/...; a private temporary folder where neither can be
    written."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tracefp4" / "kernels"
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home):
            return home
    except OSError:
        return Path(_temporary_folder().name)


def digest_of(path: Path) -> str:
    """Return the digest that names a file of this content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


@cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tracefp4-kernels-")
