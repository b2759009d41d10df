"""The engine's own process: serves one model until its standard input ends, which happens when its parent dies.

Run by path, so that nothing of rollcage is imported here. Reads its orders from the first line of standard input and
prints one line with its address when it is ready; the server's own words go to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys


def main() -> None:
    """Serve as ordered; leave when whoever gave the orders is gone."""
    # No import statement: it is an extra, and has no types.
    xllamacpp = importlib.import_module("xllamacpp")
    orders = json.loads(sys.stdin.readline())
    params = xllamacpp.CommonParams()
    params.model.path = orders["weights"]
    params.model_alias = {orders["model"]}
    params.hostnames = ["127.0.0.1"]
    params.port = orders["port"]
    params.api_keys = [orders["key"]]
    params.n_ctx = orders["context"]
    params.n_parallel = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = orders["threads"]
    params.offline = True
    params.ui = False
    params.verbosity = 2
    server = xllamacpp.Server(params)
    print(json.dumps({"address": server.listening_address}), flush=True)
    sys.stdin.read()
    # Not a return: that would wait for the answer in the making.
    os._exit(0)


if __name__ == "__main__":
    main()
