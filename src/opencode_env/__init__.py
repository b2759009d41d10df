"""The names of the published OpenCode environment, kept by rollcage."""
