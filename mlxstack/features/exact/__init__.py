"""Equal bits of rows, alone and beside others."""
