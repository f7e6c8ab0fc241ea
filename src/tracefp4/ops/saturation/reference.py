"""The definition of saturation, in plain torch: that of `formats.saturation`."""

from torch import Tensor

from tracefp4.formats import saturation as definition
from tracefp4.formats.saturation import Saturation
from tracefp4.formats.scheme import Scheme


def saturation_reference(
    x: Tensor, block_scales: Tensor, outer: Tensor, scheme: Scheme, is_recorded: bool, rows: Tensor | None
) -> Saturation:
    """Count as the definition does."""
    return definition.saturation(x, block_scales, outer, scheme, is_recorded=is_recorded, rows=rows)
