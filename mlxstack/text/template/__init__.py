"""Chat templates: probing, adaptation, rendering."""
