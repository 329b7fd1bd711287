"""One training run: the loop, checkpoints, evaluation, settings, the run folder, replay."""
