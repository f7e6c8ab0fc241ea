"""The bytes of a routed expert id in a record. Records are kept and plans are counted by this one rule."""

from tracefp4.errors import ConfigError

MAX_EXPERTS = 1 << 15
"""Two bytes hold ids as int16: torch compares and orders no uint16."""


def expert_id_bytes(num_experts: int) -> int:
    """Return the bytes of one id 0 .. num_experts-1: 1 for up to 256 experts, else 2.

    Raises:
        ConfigError: more than MAX_EXPERTS experts.
    """
    if num_experts > MAX_EXPERTS:
        raise ConfigError(
            f"A record cannot name {num_experts} experts; got a model with so many. Ids take one byte for up to 256 "
            f"experts, two for up to {MAX_EXPERTS}. Record this model without its routing (routed_layers=(), "
            "replay_routing = false)."
        )
    return 1 if num_experts <= 256 else 2
