"""A small E2B on this machine: its real API, spoken to by its real SDK, with local boxes behind it."""

from support.e2b_runtime.runtime import E2BRuntime

__all__ = ["E2BRuntime"]
