"""The version of this package, for everything that writes it down; also where the package is run without being
installed."""

VERSION = "0.1.0"
"""As in pyproject.toml."""
