"""The first process of a container box, and what it does there."""
