"""What Python programs call: `run` a rollout or a group, `evaluate` a batch, `background` from code without a loop.

`import rollcage` offers it; nothing is loaded before it is used.
"""
