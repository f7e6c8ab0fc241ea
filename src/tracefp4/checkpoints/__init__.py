"""Checkpoints on disk: read and written tensor by tensor, in Hugging Face's layout, with what every tensor is.

Memory is bounded by the largest tensor, an output appears whole or not at all, and names decide what a tensor is.
"""

from tracefp4.checkpoints.carry import change_layout, from_plain, is_imported, to_plain
from tracefp4.checkpoints.collector import collect_statistics
from tracefp4.checkpoints.container import ContainerReader, ContainerWriter
from tracefp4.checkpoints.grouping import Group, group
from tracefp4.checkpoints.header import TensorSpec
from tracefp4.checkpoints.linears import Cut, Inventory, Linear, inventory
from tracefp4.checkpoints.load import Fp4Model, load_fp4
from tracefp4.checkpoints.measure import ModuleError
from tracefp4.checkpoints.metadata import StaticScales
from tracefp4.checkpoints.names import FAMILIES, Family, Stored
from tracefp4.checkpoints.packed import PackedCheckpoint
from tracefp4.checkpoints.quantize import Settings, Summary, quantize_checkpoint
from tracefp4.checkpoints.selection import Selection, select
from tracefp4.checkpoints.source import Checkpoint
from tracefp4.checkpoints.statistics import LayerStatistics, Statistics, model_digest, read_statistics
from tracefp4.checkpoints.target import MAX_SHARD_BYTES, CheckpointWriter
from tracefp4.checkpoints.writing import Output, Progress

__all__ = [
    "FAMILIES",
    "MAX_SHARD_BYTES",
    "Checkpoint",
    "CheckpointWriter",
    "ContainerReader",
    "ContainerWriter",
    "Cut",
    "Family",
    "Fp4Model",
    "Group",
    "Inventory",
    "LayerStatistics",
    "Linear",
    "ModuleError",
    "Output",
    "PackedCheckpoint",
    "Progress",
    "Selection",
    "Settings",
    "StaticScales",
    "Statistics",
    "Stored",
    "Summary",
    "TensorSpec",
    "change_layout",
    "collect_statistics",
    "from_plain",
    "group",
    "inventory",
    "is_imported",
    "load_fp4",
    "model_digest",
    "quantize_checkpoint",
    "read_statistics",
    "select",
    "to_plain",
]
