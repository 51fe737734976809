"""Generated tasks that need no download."""
