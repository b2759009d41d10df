"""The fork server of the local sandbox: standard library only, started as a process of its own."""
