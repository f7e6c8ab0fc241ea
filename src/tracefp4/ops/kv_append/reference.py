"""The definition of kv_append: one indexed copy. It moves bytes and never looks at them."""

from torch import Tensor


def append(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Copy rows [T, C, W] to slots [T] of pages [C, F, S, W]; W is bytes or values of one head's row."""
    num_heads, num_frames, page_size, width = pages.shape
    by_slot = pages.view(num_heads, num_frames * page_size, width)
    by_slot.index_copy_(1, slots, rows.to(pages.dtype).transpose(0, 1))
