"""Programs that checks run in boxes: the standard library only, handed over as text, never left where code under test
could change them."""
