"""Where things lie in a checkout."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
EXAMPLES = ROOT / "examples"
SCRIPTS = ROOT / "scripts"
GOLDEN = TESTS / "data" / "golden"
"""Streams that a real vLLM sent."""
