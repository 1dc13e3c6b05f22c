"""A run's numbers for trackers of experiments: TensorBoard, W&B, MLflow, Prometheus; needs no torch."""
