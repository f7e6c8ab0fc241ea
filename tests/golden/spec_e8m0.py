"""E8M0 by hand. Source: OCP Microscaling Formats v1.0, section 5.4.1. Byte 255 is NaN."""

VALUES = {0: 2.0**-127, 1: 2.0**-126, 126: 0.5, 127: 1.0, 128: 2.0, 254: 2.0**127}
"""Byte -> value."""
