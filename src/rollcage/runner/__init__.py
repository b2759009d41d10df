"""Many rollouts: started, queued, run a number at once, stopped on request, and ended when their process died."""

from rollcage.runner.groups import Groups
from rollcage.runner.owners import Owners
from rollcage.runner.recovery import end_if_owner_dies, orphans, recover
from rollcage.runner.registry import Registry
from rollcage.runner.runner import Runner, StartOptions

__all__ = ["Groups", "Owners", "Registry", "Runner", "StartOptions", "end_if_owner_dies", "orphans", "recover"]
