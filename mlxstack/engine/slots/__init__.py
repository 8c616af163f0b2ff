"""KV of live slots: preparation, lookup, transfer."""
