"""What a batch is, its statistics, and how they are written: values and arithmetic, no rollout is run here."""
