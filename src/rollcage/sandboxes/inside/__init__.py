"""Programs that several backends run in or beside their boxes. Standard library only; no site-packages there."""
