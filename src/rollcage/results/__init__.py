"""What a rollout came to: the state that its log folds into, and the shape in which the world reads it."""
