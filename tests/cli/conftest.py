"""Commands run in the process of the tests: with torch imported, they make shape cards there."""

import motet.families.shape_reading.shape_walker  # noqa: F401
