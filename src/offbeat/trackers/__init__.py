"""Where a run's records can go beside its folder: TensorBoard, Weights & Biases, MLflow."""
