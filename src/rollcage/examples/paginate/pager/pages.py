"""Pages are numbered from 1; the last one may be shorter than the others."""


def page_count(total, size):
    """How many pages it takes to show `total` items, `size` at a time."""
    if size < 1:
        raise ValueError("size must be at least 1")
    return total // size


def page(items, number, size):
    """The items of one page."""
    if not 1 <= number <= max(1, page_count(len(items), size)):
        raise IndexError(f"there is no page {number}")
    start = (number - 1) * size
    return items[start : start + size]
