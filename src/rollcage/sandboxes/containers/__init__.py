"""The parts of the container backend: the engine behind its API, the line into a container, one box, its commands."""
