"""One rollout: its four stages, from an open box to a reward. `run.py` is the one to read first."""
