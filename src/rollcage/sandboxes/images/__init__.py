"""Images: prebaked boxes by name. What they are made of, how they are kept, how they are made.

Only what opening a box needs is imported here; `images.build` and `images.imports` make images.
"""

from rollcage.sandboxes.images.catalog import Image, ImageStore

__all__ = ["Image", "ImageStore"]
