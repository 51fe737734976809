"""Actions, dependencies, schedules and their lowering to programs."""
