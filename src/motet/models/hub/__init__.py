"""Loading from the hub's formats, and exporting to them."""
