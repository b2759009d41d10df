"""A local Fleet for tests and demos: no key, no account, every fault on request."""

from rollcage.testing.fleet_runtime.desk import INSTRUCTION, VERIFIER
from rollcage.testing.fleet_runtime.faults import ENDPOINTS, Faults
from rollcage.testing.fleet_runtime.instance import LocalInstance
from rollcage.testing.fleet_runtime.runtime import ENVIRONMENTS, FleetRuntime

__all__ = ["ENDPOINTS", "ENVIRONMENTS", "INSTRUCTION", "VERIFIER", "Faults", "FleetRuntime", "LocalInstance"]
