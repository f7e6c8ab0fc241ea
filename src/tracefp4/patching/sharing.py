"""One plan on all ranks: static outer scales that fit every rank's data.

Ranks that calibrate on their own batches find different exponents, and with them different plans: records of one
rank would be refused by the other. The exponent of the joined batch is the largest of theirs, for it does not fall as
a maximum grows (a rank that saw only zeros brings 0, which may be more than needed); a mean would clip. This module
never calibrates by itself.
"""

import torch
from torch.distributed import ProcessGroup

from tracefp4.patching.plan import Plan
from tracefp4.qat.parts import largest_of_ranks


def share_exponents(plan: Plan, *, group: ProcessGroup, device: torch.device | str = "cpu") -> Plan:
    """Return the plan with the largest static exponents that any rank has found: the same plan on all ranks.

    Args:
        plan: calibrated on this rank's batch; of the same rules on all ranks.
        group: the ranks, all of which must call.
        device: where the group's backend reduces.
    """
    found = plan.static_exponents
    if not found:
        return plan
    mine = torch.tensor(list(found.values()), dtype=torch.int64, device=device)
    largest = largest_of_ranks(mine, group).tolist()
    return plan.with_exponents(dict(zip(found, largest, strict=True)))
