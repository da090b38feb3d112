"""Whole trainings by name: data, models and method put together and handed to `vidgen.train.fit`."""
