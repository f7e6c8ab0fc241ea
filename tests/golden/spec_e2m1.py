"""E2M1 by hand. Source: OCP Microscaling Formats v1.0, section 5.3.3."""

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
"""Value of code 0..15."""

TIES = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6}
"""Magnitude halfway between two codes -> the even one of them."""

ROUNDED = {
    0.0: 0,
    0.2500000298023224: 1,  # nextafter(0.25, 1) in float32
    0.2499999850988388: 0,
    0.7499999403953552: 1,
    1.2500001192092896: 3,
    1.7499998807907104: 3,
    2.500000238418579: 5,
    3.499999761581421: 5,
    5.000000476837158: 7,
    6.0: 7,
    7.0: 7,
    1e30: 7,
    float("inf"): 7,
    1e-45: 0,
}
"""Magnitude -> code, around the ties and beyond the range."""
