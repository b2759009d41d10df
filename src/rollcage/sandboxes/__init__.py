"""Boxes: the protocol every backend speaks, the backends, and what can be done with any box."""
