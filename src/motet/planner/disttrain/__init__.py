"""DistTrain's planner: devices and degrees for each module."""
