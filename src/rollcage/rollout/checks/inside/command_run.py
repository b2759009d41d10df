"""In a box, as the judged: runs a command in a process of its own, and tells what it printed and left."""

from __future__ import annotations

import os
import shutil
import subprocess

from rollcage.rollout.checks.inside.reporting import begin, lay

LIMIT = 8 << 20
"""Bytes of output, or of a report, that are told."""


def main() -> None:
    """Run the command of the order, and tell its output, the report that it wrote, and how it ended."""
    order, tell = begin()
    if not shutil.which(order["argv"][0]):
        tell(missing=order["argv"][0])
        os._exit(3)
    lay(os.getcwd(), order.get("overlay", {}))
    report = order.get("report")
    if report and os.path.lexists(report):
        os.unlink(report)
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(order["argv"], stdin=null, stdout=pipe, stderr=subprocess.STDOUT) as child:
        assert child.stdout is not None
        kept = child.stdout.read(LIMIT)
        while child.stdout.read(1 << 16):
            pass
        code = child.wait()
    tell(output=kept.decode("utf-8", "replace"))
    if report and os.path.isfile(report) and not os.path.islink(report):
        with open(report, "rb") as file:
            tell(report=file.read(LIMIT).decode("utf-8", "replace"))
    ended = code if code >= 0 else 128 - code
    tell(end=ended)
    os._exit(ended)


if __name__ == "__main__":
    main()
