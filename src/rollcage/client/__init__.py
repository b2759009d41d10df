"""Asks a rollcage server for rollouts: `async with Client(address) as client`, `with SyncClient(address) as client`."""

from rollcage.client.client import Client
from rollcage.client.connection import ServerError
from rollcage.client.sync_client import SyncClient

__all__ = ["Client", "ServerError", "SyncClient"]
