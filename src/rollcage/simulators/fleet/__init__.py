"""A local Fleet for tests and demos: no key, no account, every fault on request."""

from rollcage.simulators.fleet.desk import INSTRUCTION, VERIFIER
from rollcage.simulators.fleet.faults import ENDPOINTS, Faults
from rollcage.simulators.fleet.instance import LocalInstance
from rollcage.simulators.fleet.runtime import ENVIRONMENTS, FleetRuntime

__all__ = ["ENDPOINTS", "ENVIRONMENTS", "INSTRUCTION", "VERIFIER", "Faults", "FleetRuntime", "LocalInstance"]
