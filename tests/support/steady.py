"""How tests that try examples do so; imported before `hypothesis` is used.

How fast examples are made says only how busy the machine is. The build server tries the same ones in every run: a
change is refused for what it did. Everywhere else they are new ones each time.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

in_ci = os.environ.get("CI") in ("true", "1")
settings.register_profile("steady", deadline=None, derandomize=in_ci, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")
