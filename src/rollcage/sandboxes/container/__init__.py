"""Boxes in docker or podman: the engine, the control channel into a container, one box, its commands."""
