"""Generic MCP: JSON-RPC, client sessions, the union of several endpoints' tools, and the bridge into a box."""
