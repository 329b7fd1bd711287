"""Trackers that receive the records of a run: TensorBoard, Weights & Biases and MLflow."""
