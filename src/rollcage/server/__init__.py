"""The server: rollouts over HTTP, SSE, MCP and OpenEnv. Importing this package costs nothing."""
