"""The OpenAI-compatible HTTP API: validation, jobs for the serving side, answers whole or as a stream."""
