"""Boxes in the cloud of E2B: ordered, renewed, used through commands, given back."""
