"""Boxes on this machine: namespaces held by descriptors, homes made of layers, one fork server for all."""
