"""Turn an existing model into ours: which modules, under which names, by a plan that is data."""

from tracefp4.patching.apply import Applied, apply
from tracefp4.patching.calibrate import calibrate_kv
from tracefp4.patching.plan import Plan, plan
from tracefp4.patching.rules import PlanRules

__all__ = ["Applied", "Plan", "PlanRules", "apply", "calibrate_kv", "plan"]
