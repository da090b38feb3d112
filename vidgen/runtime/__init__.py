"""The machine a run is on: devices, seeds, configurations, checkpoint files, measurements. Knows nothing of videos."""
