def take_usual(
    data: bytes,
    start: int,
    texts: bytearray,
    ids: bytearray,
    logprobs: bytearray,
    counts: bytearray,
    top_texts: bytearray,
    top_ids: bytearray,
    top_logprobs: bytearray,
    pieces: list[str | bytes],
    /,
) -> tuple[int, int, int]: ...
def calm(data: bytes, /) -> bool: ...
def singles(doubles: bytearray, /) -> bytes | None: ...
def framed(data: bytes, key: bytes, /) -> bytes | None: ...
