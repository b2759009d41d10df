def take_usual(
    data: bytes,
    start: int,
    texts: list[str],
    ids: list[int | None],
    logprobs: list[float | None],
    counts: list[int],
    top_texts: list[str],
    top_ids: list[int | None],
    top_logprobs: list[float],
    pieces: list[str | bytes],
    /,
) -> int: ...
def calm(data: bytes, /) -> bool: ...
