"""What no chapter teaches: checkpoints, test models, workloads, measuring, tracing, drawing, command-line helpers."""
