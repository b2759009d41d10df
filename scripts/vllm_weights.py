"""Prints the path of the local model's weights; they are fetched if they are not there."""

import os

import anyio

from rollcage.local_model import fetch_weights
from rollcage.settings import Settings

print(anyio.run(fetch_weights, Settings.from_environ(os.environ).cache_dir))
