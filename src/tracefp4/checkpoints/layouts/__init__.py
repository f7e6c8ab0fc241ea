"""Layouts that engines read, by the name that the command line knows, and the plain one with its sidecar."""

from tracefp4.checkpoints.layouts.compressed_tensors import CompressedTensors
from tracefp4.checkpoints.layouts.gpt_oss import GptOss
from tracefp4.checkpoints.layouts.layout import (
    Content,
    Frame,
    Layout,
    PackedLayout,
    Part,
    Precision,
    Stated,
)
from tracefp4.checkpoints.layouts.modelopt import HF_QUANT_CONFIG, ModelOpt
from tracefp4.checkpoints.layouts.plain import Plain, value_dtype
from tracefp4.errors import ConfigError

LAYOUTS: dict[str, PackedLayout] = {
    layout.name: layout for layout in (CompressedTensors(), ModelOpt(), GptOss())
}
"""Every packed layout by name."""

__all__ = [
    "HF_QUANT_CONFIG",
    "LAYOUTS",
    "Content",
    "Frame",
    "Layout",
    "PackedLayout",
    "Part",
    "Plain",
    "Precision",
    "Stated",
    "layout_by_name",
    "value_dtype",
]


def layout_by_name(name: str) -> PackedLayout:
    """Return the layout with this name. Raises: ConfigError listing all of them."""
    if name not in LAYOUTS:
        raise ConfigError(f"Unknown layout {name!r}. Layouts: {', '.join(LAYOUTS)}. Choose one of them.")
    return LAYOUTS[name]
