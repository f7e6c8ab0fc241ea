"""The errors a user can cause, one class per kind.

Every error of tracefp4 derives from TraceFP4Error, which is a ValueError: a caller that catches ValueError
keeps working. Messages have four parts: what was refused, the value received, what is allowed, what to do
next. Mistakes of our own are `assert` statements, never these classes. This module imports nothing, so
every room may import it.
"""


class TraceFP4Error(ValueError):
    """Anything that tracefp4 refuses; catch this to catch all of its errors."""


class ConfigError(TraceFP4Error):
    """A configuration key, a name or a combination of options that does not exist or does not fit."""


class FormatError(TraceFP4Error):
    """A tensor whose shape, dtype or bytes do not fit the number format or the scheme asked for."""


class RecordError(TraceFP4Error):
    """A record that cannot be used: wrong schema, checksum, scheme digest, plan digest, width or span."""


class BackendError(TraceFP4Error):
    """A named backend that cannot run this op on this device."""


class ParityError(TraceFP4Error):
    """Two implementations that must give the same bytes do not."""
