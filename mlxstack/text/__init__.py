"""Chat templates, tokenization, and parsing of model output."""
