"""The Responses dialect of OpenAI, which Codex speaks."""
