"""Compiles the gateway's inner loops when rollcage is installed. Where that cannot be done, all works without, slower.

A hook of hatchling's. It needs a C compiler and Python's headers, and nothing else.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BUILT = Path("src/rollcage/gateway/_wire.abi3.so")


class CompiledPart(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the compiled part beside its source, and into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Before a wheel is built, an editable one too."""
        if self.target_name != "wheel" or not compiled(Path(self.root) / BUILT):
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{platform}"
        build_data["artifacts"].append(f"/{BUILT}")


def compiled(target: Path) -> bool:
    """Compile the source beside it; whether that went well. What was there before is replaced, or gone."""
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")[0]
    source = target.with_name("_wire.c")
    new = target.with_name(f"_wire.{os.getpid()}.new")
    for name in (compiler, "cc", "gcc", "clang") if sys.implementation.name == "cpython" else ():
        command = [name, "-O2", "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}", "-o", str(new), str(source)]
        try:
            done = subprocess.run(command, capture_output=True, timeout=300, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            new.replace(target)
            return True
    for stale in (new, target):
        stale.unlink(missing_ok=True)
    return False
