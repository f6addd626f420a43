"""What to do next for one service: pure, from what is there now.

    service, observed, now -> hosts -> placement -> epoch -> steps + status

An epoch is a membership: a pool file in an immutable ConfigMap and the pods that mount it. While it
holds, missing prefill pods are made and surplus ones deleted. It ends when the compatibility hash
or the placement changes or a decode pod or the coordinator is gone; then, in this order, over as
many rounds as it takes:

    1 the old coordinator is deleted; SIGTERM has it finish open requests, up to drain.seconds
    2 once it is gone, the pods of old epochs are deleted and the new epoch is made beside what is
      left of them. The coordinator's Service selects the new epoch only, so that no two
      memberships are ever behind one name
    3 ConfigMaps of old epochs go when no pod of them is left

Where hosts are free for a changed pool, the next epoch starts first, beside the one that serves,
and step 1 comes once it is ready (`surge`). The gateway holds streams meanwhile and replays them.
Each round plans from what it sees, so that an operator that died between two steps, or a second
change in the midst of a first, is nothing new.
"""

from tknp_operator.plan.observed import Observed, of_service
from tknp_operator.plan.service import plan
from tknp_operator.plan.steps import Plan, Step, describe

__all__ = ["Observed", "Plan", "Step", "describe", "of_service", "plan"]
