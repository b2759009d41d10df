"""The published place of the environment's server; the server itself is rollcage's."""
