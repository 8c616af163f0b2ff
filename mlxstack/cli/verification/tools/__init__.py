"""`verify --tools`: tool calls, losses of chat templates, small repairs."""
