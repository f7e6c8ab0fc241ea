"""What a recorded decision costs in bits: binary codes, codecs of records, and expert ids. Pure data, no torch.

Whoever encodes, decodes, stores or budgets asks here for names, rates and sizes.
"""

from tracefp4.coding.codec import CODECS, Codec, Payload, ScaleCoding, codec_by_name, codec_names
from tracefp4.coding.routing import expert_id_bytes
from tracefp4.coding.syndrome import SyndromeCode, syndrome_code

__all__ = [
    "CODECS",
    "Codec",
    "Payload",
    "ScaleCoding",
    "SyndromeCode",
    "codec_by_name",
    "codec_names",
    "expert_id_bytes",
    "syndrome_code",
]
