"""Spans of rows whose float32 temporaries stay in a core's cache, for ops written in plain torch.

A chain of elementwise passes over a large tensor moves every temporary through memory, and most of the time goes to
fresh pages. The same chain over spans of half a million elements runs several times faster on a CPU. Rows are
independent, so the bytes are the same.
"""

import torch

SPAN_ELEMENTS = 1 << 19
"""Elements of a span: 2 MB of float32, measured best between 2^18 and 2^20."""


def row_spans(num_rows: int, width: int, device: torch.device) -> list[tuple[int, int]]:
    """Return the bounds [first, last) of spans that cover all rows in order.

    Args:
        num_rows: Rows of the tensor; 0 gives one empty span.
        width: Elements of a row.
        device: Where it lives; anything but a CPU gets one span.
    """
    step = max(1, SPAN_ELEMENTS // max(1, width)) if device.type == "cpu" else max(1, num_rows)
    return [(first, min(first + step, num_rows)) for first in range(0, max(1, num_rows), step)]
