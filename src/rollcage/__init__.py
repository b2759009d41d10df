"""rollcage runs real coding agents in cages and brings back training-grade rollouts."""
