"""The scripted model: an OpenAI-compatible server that answers from a script, in the exact shapes of real engines."""
